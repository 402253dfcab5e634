"""Products by streamed weights are exactly rounded where sums are exact, and fetch the memory that comes next."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from adaptive_verification.forward import streamed_products
from adaptive_verification.forward.host_floats import as_array
from adaptive_verification.forward.streamed_products import StreamedWeights, can_stream, multiplies_pairs, stream

LINE_BYTES = 64


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small ones: float32 adds up their products exactly, in whatever order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def streamed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.full((len(x), len(weight)), torch.nan).bfloat16()
    stream(as_array(x), StreamedWeights(weight, bias).addresses, as_array(y))
    return y


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 32), (188, 64), (192, 96), (404, 576)])
def test_products_are_exact_sums_rounded_once(shape: tuple[int, int], with_bias: bool) -> None:
    weight, bias = integers(*shape, seed=1), integers(shape[0], seed=2) if with_bias else None
    for num_tokens in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 32):
        x = integers(num_tokens, shape[1])
        exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert torch.equal(streamed(x, weight, bias), exact.bfloat16())


def test_a_tokens_bits_are_the_same_whatever_else_is_multiplied() -> None:
    x, weight = torch.randn(32, 576).bfloat16(), torch.randn(200, 576).bfloat16()
    together = streamed(x, weight)
    for num_tokens in range(32):
        assert torch.equal(streamed(x[:num_tokens], weight), together[:num_tokens])


def test_numbers_of_any_size_are_multiplied() -> None:
    x, weight = torch.randn(5, 64).bfloat16() * 1e-30, torch.randn(8, 64).bfloat16() * 1e30
    expected = torch.nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(streamed(x, weight).double(), expected, rtol=1e-2, atol=1e-2)
    weight[3, 5] = torch.inf
    assert streamed(x, weight)[:, 3].isinf().all()
    x[1, 7] = torch.nan
    assert streamed(x, weight).isnan().any(1).tolist() == [False, True, False, False, False]


def test_sizes_that_there_is_a_loop_for() -> None:
    for num_outputs, num_inputs, dtype, can in [
        (8, 64, torch.bfloat16, True),
        (6, 64, torch.bfloat16, False),
        (8, 48, torch.bfloat16, False),
        (8, 64, torch.float32, False),
    ]:
        assert can_stream(torch.ones(num_outputs, num_inputs, dtype=dtype)) == can


def tile_loop() -> Any:
    """A tile, compiled anew."""
    multiply_tile = streamed_products._multiply_tile

    @numba.njit
    def multiply(x: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> None:
        multiply_tile(len(x), x.ctypes.data, weights.ctypes.data, x.shape[1], sums.ctypes.data)

    return multiply


@pytest.mark.parametrize(
    "with_instruction",
    [
        pytest.param(True, marks=pytest.mark.skipif(not multiplies_pairs(), reason="the processor has no such one")),
        False,
    ],
)
def test_a_tile_is_exact_with_and_without_an_instruction_for_pairs(
    with_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_products, "multiplies_pairs", lambda: with_instruction)
    multiply, weight = tile_loop(), integers(4, 96, seed=1)
    for num_tokens in range(1, 7):
        x, sums = integers(num_tokens, 96), np.full((num_tokens, 4), np.nan, np.float32)
        multiply(as_array(x), as_array(weight), sums)
        assert (sums == (x.float() @ weight.float().t()).numpy()).all()
    (code,) = multiply.inspect_llvm().values()
    assert ("dpbf16ps" in code) == with_instruction


def test_a_tile_fetches_the_rows_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: np.ndarray = np.zeros(100, np.int64)  # how many, and the addresses

    def note(builder: Any, address: Any) -> None:
        size = ir.IntType(64)
        counter = builder.inttoptr(size(asked.ctypes.data), size.as_pointer())
        count = builder.add(builder.load(counter), size(1))
        builder.store(count, counter)
        builder.store(address, builder.gep(counter, [count]))

    monkeypatch.setattr(streamed_products, "add_prefetch", note)
    weights = as_array(integers(8, 96))
    tile_loop()(as_array(integers(2, 96)), weights, np.empty((2, 4), np.float32))
    count, *addresses = asked.tolist()
    first, end = weights[4].ctypes.data, weights.ctypes.data + weights.nbytes
    assert sorted(addresses[:count]) == list(range(first, end, LINE_BYTES))


def test_compiled_code_fetches() -> None:
    multiply = tile_loop()
    multiply(as_array(integers(2, 96)), as_array(integers(4, 96)), np.empty((2, 4), np.float32))
    (code,) = multiply.inspect_llvm().values()
    assert "call void @llvm.prefetch" in code

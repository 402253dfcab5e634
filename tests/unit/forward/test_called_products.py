"""torch's packed product as compiled loops call it."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from adaptive_verification.compiled import compiled
from adaptive_verification.forward import called_products
from adaptive_verification.forward.called_products import Handle, PackedWeights, let_go, multiply, numbers_of

pytestmark = pytest.mark.skipif(not called_products.are_callable(), reason="torch was built without this interface")
_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_product = torch.ops.mkldnn._linear_pointwise.default


@compiled
def product_into(x: int, weights: np.ndarray, output: np.ndarray) -> None:
    product = multiply(x, weights)
    numbers = carray(numbers_of(product), output.shape, np.float32)
    for row in range(output.shape[0]):
        for i in range(output.shape[1]):
            output[row, i] = numbers[row, i]
    let_go(product)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_product_called_by_a_loop_has_the_bits_of_one_called_from_python(rows: int, with_bias: bool) -> None:
    x, packed = random(rows, 12), _reorder(random(20, 12, seed=1), 256)
    bias = random(20, seed=2) if with_bias else None
    handle, weights = Handle(x), PackedWeights(packed, bias)
    output = np.empty((rows, 20), dtype=np.float32)
    product_into(handle.address, weights.addresses, output)
    assert torch.equal(torch.from_numpy(output), _product(x, packed, bias, "none", [], ""))


def test_weights_live_as_long_as_their_handles() -> None:
    weights = PackedWeights(_reorder(random(20, 12, seed=1), 256), random(20, seed=2))
    handle = Handle(random(3, 12))
    junk = [random(20, 12, seed=seed) for seed in range(50)]  # takes the memory of what was freed
    output = np.empty((3, 20), dtype=np.float32)
    product_into(handle.address, weights.addresses, output)
    expected = _product(random(3, 12), _reorder(random(20, 12, seed=1), 256), random(20, seed=2), "none", [], "")
    assert torch.equal(torch.from_numpy(output), expected)
    assert len(junk) == 50


def test_handles_and_results_give_their_memory_back() -> None:
    megabytes = 8
    weights = PackedWeights(_reorder(random(1 << 18, 1), 256), None)
    output = np.empty((megabytes, 1 << 18), dtype=np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        handle = Handle(torch.ones(megabytes << 18, 1)[:: 1 << 18])  # all of which it holds
        product_into(handle.address, weights.addresses, output)
    more_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert more_kilobytes < 20 * megabytes << 10


def test_what_torch_cannot_multiply_is_an_error() -> None:
    weights = PackedWeights(_reorder(random(20, 12, seed=1), 256), None)
    handle = Handle(random(3, 11))
    with pytest.raises(RuntimeError, match="could not multiply"):
        product_into(handle.address, weights.addresses, np.empty((3, 20), dtype=np.float32))


def test_a_build_without_the_interface_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    are_callable = called_products.are_callable.__wrapped__
    assert are_callable()
    monkeypatch.setattr(called_products, "_LIBRARY", "libtorch_other.so")
    assert not are_callable()
    monkeypatch.setattr(called_products, "_LIBRARY", "libc10.so")  # has none of the functions
    assert not are_callable()

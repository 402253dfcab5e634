"""Linear layers computed in another way give the same numbers, and only where that was measured to be faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_verification.forward import linear
from adaptive_verification.forward.linear import (
    can_pack,
    fastest_way,
    float16_scale,
    multiplied_rows,
    padded_rows,
    use_fastest_linear,
)
from adaptive_verification.forward.streamed_products import stream

WAYS = ("plain", "transposed", "float16_weights", "packed", "streamed")


def model() -> nn.Sequential:
    """With weights as they are published: bfloat16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 7, bias=False)).bfloat16().float()


def computed_by(way: str, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    monkeypatch.setattr(linear, "fastest_way", lambda linears: way)
    layers = model()
    assert use_fastest_linear(layers) == way
    return layers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 128, 129])
def test_the_numbers_are_the_same_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, way: str, rows: int) -> None:
    other = computed_by(way, monkeypatch)
    x = torch.randn(1, rows, 12)
    with torch.inference_mode():
        expected, got = model()(x), other(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS[1:])
def test_another_way_is_really_taken(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    assert all(type(layer) is not nn.Linear for layer in computed_by(way, monkeypatch))


def test_weights_of_any_size_are_kept_exactly_by_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 3)
    weight = [[2.0**-20, 1.5 * 2.0**-26, 0.0], [3.0, -(2.0**-22), 1.0], [2.5, 0.0, -3.5]]
    layer.weight = nn.Parameter(torch.tensor(weight))
    expected = layer(torch.eye(3))
    monkeypatch.setattr(linear, "fastest_way", lambda linears: "float16_weights")
    use_fastest_linear(nn.Sequential(layer))
    assert torch.equal(layer(torch.eye(3)), expected)
    assert layer.input_scale != 1


@pytest.mark.parametrize(
    "weight",
    [[[1.0, 1 + 2.0**-20]], [[1.0, 2.0**-40]], [[torch.inf, 1.0]], [[torch.nan, 1.0]]],
    ids=["more digits", "more range", "infinite", "no number"],
)
def test_weights_that_float16_would_change_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, weight: list[list[float]]
) -> None:
    layer = nn.Linear(2, 1)
    layer.weight = nn.Parameter(torch.tensor(weight))
    monkeypatch.setattr(linear, "fastest_way", lambda linears: "float16_weights")
    use_fastest_linear(nn.Sequential(layer))
    assert type(layer) is nn.Linear
    assert float16_scale(layer.weight) is None
    assert float16_scale(torch.zeros(1, 2, dtype=torch.bfloat16)) is None


def test_what_is_no_plain_linear_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    monkeypatch.setattr(linear, "fastest_way", lambda linears: "transposed")
    mixed = nn.Sequential(nn.Linear(4, 4), Special(4, 4))
    use_fastest_linear(mixed)
    assert type(mixed[1]) is Special


@pytest.mark.parametrize(
    ("transposed", "float16_weights", "expected"),
    [(0.5, 0.4, "float16_weights"), (0.5, 0.9, "transposed"), (0.95, 0.9, "plain"), (2.0, 2.0, "plain")],
)
def test_only_a_clear_gain_counts(
    monkeypatch: pytest.MonkeyPatch, transposed: float, float16_weights: float, expected: str
) -> None:
    clock = 0.0

    def takes(seconds: float) -> Callable[[Any, Any], torch.Tensor]:
        def product(x: Any, weight: Any) -> torch.Tensor:
            nonlocal clock
            clock += seconds
            return torch.zeros(())

        return product

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    monkeypatch.setattr("adaptive_verification.forward.linear.F.linear", takes(1.0))
    monkeypatch.setattr(linear, "_transposed_product", takes(transposed))
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", takes(float16_weights))
    assert fastest_way([layer for layer in model() if isinstance(layer, nn.Linear)]) == expected


def test_a_build_without_float16_weights_chooses_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor, bias: None) -> None:
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16")

    monkeypatch.setattr(torch.ops.quantized, "linear_prepack_fp16", missing)
    assert fastest_way([nn.Linear(8, 8).bfloat16().float()]) in ("plain", "transposed")


def test_weights_are_packed_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest_way([nn.Linear(8, 8)]) != "packed"
    monkeypatch.setattr(linear, "_packed", lambda weight: weight)  # as on a processor that multiplies bfloat16
    monkeypatch.setattr(linear, "_packed_product", torch.nn.functional.linear)
    monkeypatch.setattr(linear, "multiplies_pairs", lambda: False)
    assert fastest_way([nn.Linear(8, 8).bfloat16()]) == "packed"


def test_a_build_that_cannot_pack_chooses_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> None:
        raise RuntimeError("mkldnn_reorder_linear_weight: ATen not compiled with MKLDNN support")

    monkeypatch.setattr(linear, "_packed", missing)
    assert fastest_way([nn.Linear(8, 8).bfloat16()]) in ("plain", "transposed")


needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.ones(1, 1).bfloat16()), reason="the processor multiplies no bfloat16"
)


@needs_bfloat16
@pytest.mark.parametrize("way", ["packed", "streamed"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 32, 33, 300])
def test_bfloat16_gives_the_numbers_of_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, rows: int, bias: bool, way: str
) -> None:
    layer = nn.Linear(64, 96, bias=bias).bfloat16()
    x = torch.randn(2 * rows, 64).bfloat16()[::2]
    with torch.inference_mode():
        expected = layer(x)
        monkeypatch.setattr(linear, "fastest_way", lambda linears: way)
        use_fastest_linear(nn.Sequential(layer))
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer(x[None]), expected[None])


@needs_bfloat16
def test_weights_are_streamed_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed: list[int] = []

    def counted(x: Any, weights: Any, output: Any) -> None:
        streamed.append(len(x))
        stream(x, weights, output)

    monkeypatch.setattr(linear, "stream", counted)
    monkeypatch.setattr(linear, "multiplies_in_tiles", lambda: False)
    monkeypatch.setattr(linear, "fastest_way", lambda linears: "streamed")
    layers = [nn.Linear(64, 96).bfloat16(), nn.Linear(64, 95).bfloat16(), nn.Linear(80, 96).bfloat16()]
    use_fastest_linear(nn.ModuleList(layers))
    with torch.inference_mode():
        for layer in layers:  # the other two are of sizes that there is no loop for
            for rows in (1, 32, 33):
                layer(torch.ones(rows, layer.in_features).bfloat16())
    assert streamed == [1, 32]
    assert [multiplied_rows(layers[0], rows) for rows in (17, 32, 33)] == [17, 32, 36]
    assert multiplied_rows(layers[1], 17) == 20


@pytest.mark.parametrize(
    ("pairs", "tiles", "way"), [(True, False, "streamed"), (True, True, "packed"), (False, False, "packed")]
)
def test_weights_are_streamed_where_the_processor_has_pairs_and_no_tiles(
    monkeypatch: pytest.MonkeyPatch, pairs: bool, tiles: bool, way: str
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda weight: True)
    monkeypatch.setattr(linear, "multiplies_pairs", lambda: pairs)
    monkeypatch.setattr(linear, "multiplies_in_tiles", lambda: tiles)
    assert fastest_way([nn.Linear(64, 64).bfloat16()]) == way


@pytest.mark.parametrize("in_tiles", [True, False])
def test_many_numbers_of_rows_are_few_kernels(in_tiles: bool) -> None:
    padded = [padded_rows(num_rows, in_tiles=in_tiles) for num_rows in range(2049)]
    assert padded[:17] == list(range(17))
    assert all(rows >= num_rows for num_rows, rows in enumerate(padded))
    most_more = 32 if in_tiles else 4
    assert all(rows - num_rows < max(most_more, num_rows / 8) for num_rows, rows in enumerate(padded))
    assert len(set(padded)) < 80

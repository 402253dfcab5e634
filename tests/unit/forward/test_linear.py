"""Linear layers computed the other way round give the same numbers, and only where that was measured to be faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adaptive_verification.forward import linear
from adaptive_verification.forward.linear import use_fastest_linear


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 7, bias=False))


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 128, 129])
def test_the_numbers_are_the_same_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    plain, other = model(), model()
    monkeypatch.setattr(linear, "_transposed_is_faster", lambda weights: True)
    assert use_fastest_linear(other)
    x = torch.randn(1, rows, 12)
    with torch.inference_mode():
        expected, got = plain(x), other(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_a_model_is_left_alone_where_its_own_way_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_transposed_is_faster", lambda weights: False)
    untouched = model()
    assert not use_fastest_linear(untouched)
    assert type(untouched[0]) is nn.Linear  # type: ignore[index]


def test_what_is_no_plain_linear_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    monkeypatch.setattr(linear, "_transposed_is_faster", lambda weights: True)
    mixed = nn.Sequential(nn.Linear(4, 4), Special(4, 4))
    use_fastest_linear(mixed)
    assert type(mixed[1]) is Special


@pytest.mark.parametrize(("factor", "expected"), [(0.5, True), (0.95, False), (2.0, False)])
def test_only_a_clear_gain_counts(monkeypatch: pytest.MonkeyPatch, factor: float, expected: bool) -> None:
    clock = 0.0

    def passes(seconds: float) -> torch.Tensor:
        nonlocal clock
        clock += seconds
        return torch.zeros(())

    monkeypatch.setattr("adaptive_verification.forward.linear.time.perf_counter", lambda: clock)
    monkeypatch.setattr("adaptive_verification.forward.linear.F.linear", lambda x, weight: passes(1.0))
    monkeypatch.setattr(linear, "_transposed_product", lambda x, weight: passes(factor))
    assert linear._transposed_is_faster([torch.zeros(3, 2)]) is expected

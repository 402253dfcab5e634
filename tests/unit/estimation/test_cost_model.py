from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from adaptive_verification.contract.costs import DraftCost, StepCost
from adaptive_verification.estimation.cost_model import (
    DRAFT_EXTEND,
    DRAFT_PREFILL,
    VERIFY,
    VERIFY_CONTEXT,
    CostCurve,
    CostModel,
    LiveCurve,
    measure_curve,
    publish_curves,
    read_curves,
)

VERIFY_CURVE = CostCurve((1, 8, 64, 512), (19.0, 22.0, 52.0, 277.0))
CURVES = {
    VERIFY: VERIFY_CURVE,
    DRAFT_PREFILL: CostCurve((1, 64), (2.0, 5.0)),
    DRAFT_EXTEND: CostCurve((1, 64), (1.0, 3.0)),
}


def _step_cost(
    *, verify_ms: float = 52.0, tokens: float = 64, prefill_ms: float = 5.0, extend_ms: float = 18.0, depth: float = 7
) -> StepCost:
    return StepCost(DraftCost(prefill_ms, 64, extend_ms, 64, depth), 1.0, verify_ms, 64, tokens)


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=12))
def test_a_curve_is_the_isotonic_regression_of_its_measurements(times: list[float]) -> None:
    curve = CostCurve(tuple(range(1, len(times) + 1)), tuple(times))
    np.testing.assert_allclose(curve.milliseconds, isotonic_regression(times).x, rtol=1e-9)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [((1,), (1.0,)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1, 2), (0.0, 1.0)), ((1, 2), (1.0, math.nan))],
)
def test_a_curve_that_is_none_is_refused(sizes: tuple[float, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        CostCurve(sizes, times)


def test_a_fresh_curve_interpolates_and_continues_beyond_its_sizes() -> None:
    curve = LiveCurve(CostCurve((1, 8, 64), (19.0, 22.0, 50.0)))
    sizes = np.array([0.5, 1, 8, 36, 64, 128])
    expected = [19.0, 19.0, 22.0, 36.0, 50.0, 82.0]
    np.testing.assert_allclose(curve.at_all(sizes), expected, rtol=1e-12)
    np.testing.assert_allclose([curve.at(size) for size in sizes], expected, rtol=1e-12)


def test_one_outlier_hardly_moves_a_curve() -> None:
    curve = LiveCurve(VERIFY_CURVE)
    curve.observe(64, 5000.0)
    assert curve.at(64) == pytest.approx(52.0, rel=0.05)


def test_a_slower_machine_is_followed_and_a_fifth_of_outliers_does_not_mislead() -> None:
    curve, random = LiveCurve(VERIFY_CURVE), np.random.default_rng(1)
    for step in range(1000):
        size = int(random.choice([8, 30, 64, 100]))
        truth = 1.5 * float(np.interp(size, VERIFY_CURVE.sizes, VERIFY_CURVE.milliseconds))
        curve.observe(size, truth * (10.0 if step % 5 == 0 else random.normal(1.0, 0.03)))
    for size in (8, 30, 64):
        truth = 1.5 * float(np.interp(size, VERIFY_CURVE.sizes, VERIFY_CURVE.milliseconds))
        assert curve.at(size) == pytest.approx(truth, rel=0.1)


def test_observations_at_one_size_only_raise_the_others_with_it_but_never_out_of_order() -> None:
    curve = LiveCurve(VERIFY_CURVE)
    for _ in range(500):
        curve.observe(8, 66.0)
    assert curve.at(8) == pytest.approx(66.0, rel=0.02)
    assert all(np.diff(curve.milliseconds) >= 0)


def test_what_is_no_longer_observed_returns_to_what_was_measured() -> None:
    curve = LiveCurve(VERIFY_CURVE)
    for _ in range(200):
        curve.observe(64, 520.0)
    assert curve.at(64) > 300
    for _ in range(3000):
        curve.forget_a_little()
    assert curve.at(64) == pytest.approx(52.0, rel=0.05)


def test_a_drafter_that_was_disturbed_becomes_affordable_again_without_being_used() -> None:
    model = CostModel(CURVES)
    for _ in range(500):
        model.observe(_step_cost(extend_ms=180.0))
    disturbed = model.draft_ms(64, 64, 7)
    for _ in range(2000):
        model.observe(_step_cost(extend_ms=0.0, depth=0))
    assert disturbed > 100
    assert model.draft_ms(64, 64, 7) == pytest.approx(5.0 + 6 * 3.0, rel=0.2)


@pytest.mark.parametrize(
    ("size", "milliseconds"), [(0, 1), (8, 0), (8, -1), (8, math.nan), (math.inf, 1), (8, math.inf)]
)
def test_numbers_that_are_no_time_are_ignored(size: float, milliseconds: float) -> None:
    curve = LiveCurve(VERIFY_CURVE)
    curve.observe(size, milliseconds)
    assert curve.milliseconds == pytest.approx(VERIFY_CURVE.milliseconds)


def test_the_model_is_ready_only_with_all_curves() -> None:
    assert CostModel(CURVES).ready
    for name in CURVES:
        assert not CostModel({other: curve for other, curve in CURVES.items() if other != name}).ready


def test_draft_cost_is_one_prefill_and_a_forward_for_each_further_depth() -> None:
    assert CostModel(CURVES).all_draft_ms(64, 64, 3) == pytest.approx([0.0, 5.0, 8.0, 11.0])


def test_pauses_between_requests_hardly_count_as_step_time() -> None:
    model = CostModel(CURVES)
    for step in range(1000):
        model.observe_other(60_000.0 if step % 20 == 0 else 3.0)
    assert model.other_ms == pytest.approx(3.0, abs=0.2)


def test_a_new_measurement_replaces_what_was_learned_and_the_same_one_does_not() -> None:
    model = CostModel(CURVES)
    for _ in range(100):
        model.observe(_step_cost(verify_ms=104.0))
    learned = model.curves[VERIFY].at(64)
    model.measured(CURVES)
    assert model.curves[VERIFY].at(64) == learned
    model.measured({VERIFY: CostCurve((1, 64), (10.0, 20.0))})
    assert model.curves[VERIFY].at(64) == pytest.approx(20.0)


def test_the_model_survives_being_written_and_read() -> None:
    model = CostModel(CURVES)
    for _ in range(50):
        model.observe(_step_cost(verify_ms=80.0))
        model.observe_other(2.0)
    other = CostModel()
    other.load_state_dict(json.loads(json.dumps(model.state_dict())))
    assert other.state_dict() == model.state_dict()
    assert other.ready


def test_curves_travel_between_processes_through_files(tmp_path: Path) -> None:
    publish_curves(tmp_path, "verifier", {VERIFY: VERIFY_CURVE})
    publish_curves(tmp_path, "drafter", {name: CURVES[name] for name in (DRAFT_PREFILL, DRAFT_EXTEND)})
    assert read_curves(tmp_path) == CURVES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs-drafter.json", "costs-verifier.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"curves": {"verify": {"sizes": [1], "milliseconds": [1]}}}'])
def test_a_damaged_curve_file_is_a_warning(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    publish_curves(tmp_path, "drafter", {DRAFT_PREFILL: CURVES[DRAFT_PREFILL]})
    (tmp_path / "costs-verifier.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert read_curves(tmp_path) == {DRAFT_PREFILL: CURVES[DRAFT_PREFILL]}
    assert "costs-verifier.json" in caplog.text


class _Machine:
    """A clock, and runs that take `1 ms x size x slowness(run)`."""

    def __init__(self, slowness: Callable[[int], float]) -> None:
        self.now, self.runs, self._slowness = 0.0, 0, slowness

    def run(self, size: int) -> None:
        self.now += 0.001 * size * self._slowness(self.runs)
        self.runs += 1


def test_measuring_takes_the_fastest_and_goes_on_while_it_finds_faster_ones() -> None:
    hiccups = _Machine(lambda run: 1 if run in (9, 12) else 100)
    curve = measure_curve(hiccups.run, [1, 10], clock=lambda: hiccups.now)
    assert curve.sizes == (1, 10)
    assert curve.milliseconds == pytest.approx((100.0, 1000.0)), "in four rounds nothing was faster than in the first"
    spells = _Machine(lambda run: 1 if run in (5, 10) else 100)
    curve = measure_curve(spells.run, [1, 10], clock=lambda: spells.now)
    assert curve.milliseconds == pytest.approx((1.0, 10.0))
    assert spells.runs == 2 * (6 + 3)


def test_measuring_ends_on_a_machine_that_gets_ever_faster() -> None:
    warming = _Machine(lambda run: 0.9**run)
    measure_curve(warming.run, [1, 10], clock=lambda: warming.now)
    assert warming.runs < 50


def test_what_is_looked_back_at_costs_time_but_not_the_tokens() -> None:
    context = CostCurve((1024, 16384), (50.0, 70.0))
    model = CostModel({**CURVES, VERIFY_CONTEXT: context})
    without = CostModel(CURVES)
    assert model.verify_ms(64, 15360) == pytest.approx(without.verify_ms(64) + 20.0)
    assert model.all_verify_ms(np.array([8, 64])) == pytest.approx(without.all_verify_ms(np.array([8, 64])))
    for _ in range(200):
        model.observe(_step_cost(verify_ms=52.0 + 20.0), 15360)
        without.observe(_step_cost(verify_ms=52.0 + 20.0))
    assert model.curves[VERIFY].at(64) == pytest.approx(52.0)
    assert without.curves[VERIFY].at(64) > 60
    for _ in range(500):
        model.observe(_step_cost(verify_ms=2 * (52.0 + 20.0)), 15360)
    assert model.verify_ms(64, 15360) == pytest.approx(144.0, rel=0.03), "a slower machine is slower at both"

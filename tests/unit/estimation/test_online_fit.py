from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.estimation.reference import ReferenceFit
from tests.unit.estimation.streams import StreamStep, fold, make_stream
from torch import Tensor

from adaptive_verification.estimation.features import logit_q_max
from adaptive_verification.estimation.online_fit import OnlineFit
from adaptive_verification.sampling.truncation import scale

TRACE = Path(os.environ.get("ADAPTIVE_VERIFICATION_TEST_DATA", "../shared/data")) / "vllm_estimator_trace.json"


@pytest.mark.parametrize("shared", [(0.8,), (0.8, 0.5), (0.7, 0.2, 0.4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_coefficients_equal_the_full_system_solved_in_float64(
    shared: tuple[float, ...], dtype: torch.dtype, tolerance: float
) -> None:
    fit = OnlineFit(5, len(shared), refit_interval=10, dtype=dtype)
    reference = ReferenceFit(5, len(shared), refit_interval=10)
    for step in make_stream(1, steps=80, shared=shared):
        refitted = fold(fit, step)
        reference.fold(step.features, step.admitted, step.accepted)
        if refitted:
            np.testing.assert_allclose(fit.shared.numpy(), reference.shared, atol=tolerance)
            np.testing.assert_allclose(fit.intercepts.numpy(), reference.intercepts, atol=tolerance)
    assert fit.refits == 8


@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not there")
def test_coefficients_and_predictions_equal_those_of_vllm() -> None:
    trace = json.loads(TRACE.read_text())
    fit = OnlineFit(trace["num_speculative_tokens"], refit_interval=trace["constants"]["refit_interval"])
    expected = iter(trace["coefficients"])
    for folds, step in enumerate(trace["steps"], start=1):
        features = np.asarray(step["features"])[..., None]
        if fold(fit, StreamStep(features, np.asarray(step["admitted"]), np.asarray(step["accepted"]))):
            coefficients = next(expected)
            assert coefficients["after_steps"] == folds
            assert fit.shared.item() == pytest.approx(coefficients["slope"], abs=1e-5)
            np.testing.assert_allclose(fit.intercepts.numpy(), coefficients["intercepts"], atol=1e-5)
    assert next(expected, None) is None

    example = trace["predict_example"]
    logits = torch.tensor(example["logits"]).transpose(0, 1)  # [rows, K, vocabulary]
    temperature = torch.tensor(example["temperature"]).unsqueeze(1)
    log_odds = logit_q_max(scale(logits, temperature))
    np.testing.assert_allclose(log_odds.numpy(), example["features"], atol=1e-5)
    cold = OnlineFit(trace["num_speculative_tokens"])
    np.testing.assert_allclose(cold.predict(log_odds.unsqueeze(-1)).numpy(), example["confidence"], atol=1e-5)


def test_a_second_coefficient_without_evidence_leaves_the_reference_unchanged() -> None:
    one, two = OnlineFit(5, 1, refit_interval=10), OnlineFit(5, 2, refit_interval=10)
    for step in make_stream(2, steps=50):
        fold(one, step)
        fold(two, StreamStep(np.concatenate([step.features, 0 * step.features], -1), step.admitted, step.accepted))
    torch.testing.assert_close(two.shared, torch.tensor([one.shared.item(), 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(two.intercepts, one.intercepts, atol=1e-5, rtol=0)


def test_a_shift_of_all_intercepts_is_tracked_within_three_refits() -> None:
    before, after = (0.4, 0.0, -0.3), (-0.6, -1.0, -1.3)
    fit = OnlineFit(3)
    for step in make_stream(3, steps=500, intercepts=before, rows=64, full=True):
        fold(fit, step)
    np.testing.assert_allclose(fit.intercepts.numpy(), before, atol=0.15)
    for step in make_stream(4, steps=300, intercepts=after, rows=64, full=True):
        fold(fit, step)
    np.testing.assert_allclose(fit.intercepts.numpy(), after, atol=0.15)
    assert fit.shared.item() == pytest.approx(0.8, abs=0.05)


def test_a_position_that_is_hardly_ever_reached_stays_near_its_start() -> None:
    fit = OnlineFit(3)
    random = np.random.default_rng(5)
    for number, step in enumerate(make_stream(5, steps=300, intercepts=(0.0, 0.0, 0.0), rows=16)):
        reached = number % 100 == 0  # the last position gets one label in each refit, always accepted
        admitted = np.minimum(step.admitted, 2)
        accepted = np.minimum(step.accepted, 2)
        if reached:
            admitted[0], accepted[0] = 3, 3
        fold(fit, StreamStep(step.features + random.normal(0, 1e-3), admitted, accepted))
    assert abs(fit.intercepts[2].item() + 0.2) < 0.5
    np.testing.assert_allclose(fit.intercepts[:2].numpy(), 0.0, atol=0.4)


def test_a_negative_slope_is_held_at_zero() -> None:
    fit = OnlineFit(2)
    for step in make_stream(6, steps=500, shared=(-1.0,), intercepts=(0.0, 0.0), full=True):
        fold(fit, step)
    assert fit.shared.item() == 0.0


def _certain_fit(features: Tensor, accepted: Tensor) -> OnlineFit:
    fit = OnlineFit(features.shape[1], features.shape[2], refit_interval=5)
    for _ in range(400):
        fit.fold(features, accepted, torch.ones_like(accepted))
    return fit


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("num_positions", [1, 4])
@pytest.mark.parametrize("scale", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("case", ["all accepted", "all rejected", "separable", "contradictory"])
def test_coefficients_stay_finite_and_recover(num_shared: int, num_positions: int, scale: float, case: str) -> None:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(32, num_positions, num_shared, generator=generator) * scale
    features.clamp_(-40, 40)
    above = features[..., 0] > 0
    cases = {
        "all accepted": torch.ones_like(above),
        "all rejected": torch.zeros_like(above),
        "separable": above,
        "contradictory": ~above,
    }
    fit = _certain_fit(features, cases[case])
    assert fit.shared.isfinite().all()
    assert fit.intercepts.isfinite().all()
    # The world turns round after the fit has become certain: half of everything is accepted, whatever the feature.
    for _ in range(200):
        labels = torch.rand(features.shape[:2], generator=generator) < 0.5
        fit.fold(torch.randn(features.shape, generator=generator), labels, torch.ones_like(labels))
    prediction = fit.predict(torch.zeros(1, num_positions, num_shared))
    assert ((prediction > 0.3) & (prediction < 0.7)).all(), prediction


def test_steps_without_labels_count_but_change_nothing() -> None:
    fit = OnlineFit(3, refit_interval=4)
    nothing = torch.zeros(0, 3, dtype=torch.bool)
    assert not fit.fold(torch.zeros(0, 3, 1), nothing, nothing)
    unlabelled = torch.zeros(5, 3, dtype=torch.bool)
    assert not fit.fold(torch.ones(5, 3, 1), unlabelled, unlabelled)
    assert not fit.fold(torch.ones(5, 3, 1), unlabelled, unlabelled)
    assert fit.fold(torch.ones(5, 3, 1), unlabelled, unlabelled)
    assert fit.shared.tolist() == [0.5]
    torch.testing.assert_close(fit.intercepts, torch.full((3,), -0.2))


def test_statistics_start_anew_after_a_refit() -> None:
    fit = OnlineFit(5, refit_interval=10)
    for step in make_stream(8, steps=10):
        fold(fit, step)
    assert fit.refits == 1
    assert not np.any(fit.state_dict()["sums"])


def test_a_restored_fit_continues_exactly() -> None:
    """As the one that was written; and as one that never was, but for rounding, because what waits is added up before
    it is written, so other steps are added up together."""
    stream = list(make_stream(9, steps=37))
    uninterrupted, written, restored = (OnlineFit(5, refit_interval=10) for _ in range(3))
    for step in stream[:24]:
        fold(uninterrupted, step)
        fold(written, step)
    restored.load_state_dict(json.loads(json.dumps(written.state_dict())))
    for step in stream[24:]:
        for fit in (uninterrupted, written, restored):
            fold(fit, step)
    assert restored.state_dict() == written.state_dict()
    for name, value in uninterrupted.state_dict().items():
        torch.testing.assert_close(torch.tensor(restored.state_dict()[name]), torch.tensor(value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("damage", [{"shared": [float("nan")]}, {"intercepts": [0.0]}, {"sums": []}, {"sums": None}])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: dict[str, object]) -> None:
    fit = OnlineFit(5)
    before = fit.state_dict()
    with pytest.raises((ValueError, TypeError)):
        fit.load_state_dict({**before, **damage})
    assert fit.state_dict() == before

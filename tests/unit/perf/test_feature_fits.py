"""The offline fit is the best one, cross-validation does not peek, and the online fit comes near."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from perf.feature_fits import FOLDS, PENALTY, fit_offline, predict_offline, predict_online
from perf.feature_labels import Labels
from perf.feature_quality import quality
from scipy.optimize import minimize
from tests.unit.perf.made_traces import made_trace

from adaptive_verification.estimation.features import FEATURES
from adaptive_verification.estimation.trace import TraceConstants, replay

LOGIT = FEATURES["logit_q_max"]


def test_the_offline_fit_is_the_maximum_of_the_likelihood() -> None:
    labels = Labels.of(made_trace(steps=200))
    features = np.stack([labels.feature(LOGIT), labels.feature(FEATURES["top_two_margin"])], axis=1)
    design = np.concatenate([features, np.eye(3)[labels.position]], axis=1)

    def objective(coefficients: np.ndarray) -> float:
        scores = design @ coefficients
        return float((np.logaddexp(0, scores) - labels.accepted * scores).sum() + PENALTY * (coefficients**2).sum() / 2)

    expected = minimize(objective, np.zeros(5), method="BFGS", options={"gtol": 1e-7}).x
    found = fit_offline(features, labels.position, labels.accepted, 3)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert objective(found) <= objective(expected) + 1e-9


def test_a_position_without_an_accepted_draft_has_a_finite_intercept() -> None:
    labels = Labels.of(made_trace())
    accepted = labels.accepted & (labels.position < 2)
    coefficients = fit_offline(labels.feature(LOGIT)[:, None], labels.position, accepted, 3)
    assert np.isfinite(coefficients).all()
    assert coefficients[-1] < -5


@pytest.mark.parametrize("with_history", [False, True])
def test_no_label_is_predicted_from_its_own_block_or_from_what_its_request_has_later(with_history: bool) -> None:
    labels = Labels.of(made_trace(spread=1.0))
    predicted = predict_offline(labels, LOGIT, with_history=with_history)
    request = 7
    of_request = labels.request == request
    last = of_request & (labels.step == labels.step[of_request].max())
    changed = dataclasses.replace(labels, accepted=np.where(last, ~labels.accepted, labels.accepted))
    again = predict_offline(changed, LOGIT, with_history=with_history)
    np.testing.assert_array_equal(again[of_request], predicted[of_request])
    others = labels.request % FOLDS != request % FOLDS
    assert (again[others] != predicted[others]).any()


def test_a_feature_without_a_fit_is_its_own_prediction() -> None:
    labels = Labels.of(made_trace())
    np.testing.assert_allclose(
        predict_offline(labels, FEATURES["q_max_unfitted"]), 1 / (1 + np.exp(-labels.log_odds)), atol=1e-6
    )


@pytest.mark.parametrize("with_history", [False, True])
def test_online_predictions_are_those_of_the_replay(with_history: bool) -> None:
    trace = made_trace(spread=1.0)
    labels = Labels.of(trace)
    evidence = "history" if with_history else "none"
    constants = TraceConstants.model_validate(trace.constants.model_dump() | {"evidence": evidence})
    report = replay(trace, constants).calibration.report()
    ours = quality(labels, predict_online(trace, LOGIT, with_history=with_history))
    assert ours.labels == report.labels
    assert ours.log_loss == pytest.approx(report.log_loss, abs=1e-6)


@pytest.mark.parametrize("with_history", [False, True])
def test_the_online_fit_comes_within_two_thousandths_of_the_best_offline_fit(with_history: bool) -> None:
    trace = made_trace(steps=1500, spread=1.0, refit_interval=100)
    labels = Labels.of(trace)
    warm = labels.step >= 300
    online, offline = (
        quality(labels, predicted, chosen=warm).log_loss
        for predicted in (
            predict_online(trace, LOGIT, with_history=with_history),
            predict_offline(labels, LOGIT, with_history=with_history, folds=1),
        )
    )
    assert online is not None
    assert offline is not None
    assert online - offline < 0.002

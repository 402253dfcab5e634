"""Predictions of labelled drafts: by the best offline fit, and by the estimator's own fit as it would have made them.

Both have the same form: m shared coefficients and an intercept for each position. Pure functions of labels and traces.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_verification.estimation.features import Feature
from adaptive_verification.estimation.trace import Trace, TraceConstants, replay_feature
from perf.feature_labels import Floats, Labels, history

FOLDS = 5
PENALTY = 1e-6
"""Of half the squared coefficients: where a position has no accepted draft at all, its intercept stays finite."""
_MAX_ITERATIONS = 200
_MAX_STEP = 3.0
_TOLERANCE = 1e-8


def fit_offline(
    features: Floats, position: NDArray[np.int64], accepted: NDArray[np.bool_], num_positions: int
) -> Floats:
    """The maximum-likelihood coefficients, shared ones first: Newton's method (IRLS) to convergence.

    Args:
        features: `[labels, m]`.
        position, accepted: `[labels]`.

    Returns:
        `[m + K]`.
    """
    design = _design(features, position, num_positions)
    coefficients = np.zeros(design.shape[1])
    for _ in range(_MAX_ITERATIONS):
        p = _sigmoid(design @ coefficients)
        gradient = design.T @ (accepted - p) - PENALTY * coefficients
        information = design.T @ (design * (p * (1 - p))[:, None]) + PENALTY * np.eye(len(coefficients))
        step = np.linalg.solve(information, gradient).clip(-_MAX_STEP, _MAX_STEP)
        coefficients = coefficients + step
        if np.abs(step).max() < _TOLERANCE:
            return coefficients
    raise RuntimeError(f"the fit of {len(accepted)} labels has not converged in {_MAX_ITERATIONS} iterations")


def fold_of(labels: Labels, folds: int = FOLDS) -> NDArray[np.int64]:
    """The fold of each label; a request is in one."""
    return labels.request % folds


def predict_offline(labels: Labels, feature: Feature, *, with_history: bool = False, folds: int = FOLDS) -> Floats:
    """Acceptance probabilities by offline fits, `[labels]`.

    A label is predicted by the fit of the other folds, which hold whole requests. The history is made from the
    predictions without it, and is each request's own; so none of it comes from the fold's labels but those before.

    Args:
        feature: without a fit it is itself the log-odds.
        folds: 1: by the fit of all labels, the predicted ones included.
    """
    values = labels.feature(feature)
    if not feature.fitted:
        return _sigmoid(values)
    predicted = np.empty(len(labels))
    fold = fold_of(labels, folds)
    for number in range(folds):
        held_out = fold == number
        train = ~held_out if folds > 1 else held_out
        own = values[:, None]
        without = _fit_and_predict(labels, own, train)
        if with_history:
            both = np.stack([values, history(labels, without)], axis=1)
            predicted[held_out] = _fit_and_predict(labels, both, train)[held_out]
        else:
            predicted[held_out] = without[held_out]
    return predicted


def predict_online(trace: Trace, feature: Feature, *, with_history: bool = False) -> Floats:
    """Acceptance probabilities as the estimator's fit makes them along the stream, from a cold start, `[labels]`."""
    evidence = "history" if with_history else "none"
    constants = TraceConstants.model_validate(trace.constants.model_dump() | {"evidence": evidence})
    predictions = replay_feature(trace, constants, feature).predictions
    return np.concatenate(
        [probability[step.labels()[1]] for step, probability in zip(trace.steps, predictions, strict=True)]
    ).astype(np.float64)


def _fit_and_predict(labels: Labels, features: Floats, train: NDArray[np.bool_]) -> Floats:
    coefficients = fit_offline(features[train], labels.position[train], labels.accepted[train], labels.num_positions)
    return _sigmoid(_design(features, labels.position, labels.num_positions) @ coefficients)


def _design(features: Floats, position: NDArray[np.int64], num_positions: int) -> Floats:
    """`[labels, m + K]`, a 1 in the place of the label's intercept."""
    return np.concatenate([features, np.eye(num_positions)[position]], axis=1)


def _sigmoid(values: Floats) -> Floats:
    return torch.sigmoid(torch.from_numpy(values)).numpy()

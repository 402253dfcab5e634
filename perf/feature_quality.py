"""How good predictions of labelled drafts are, and by how much one is better than another. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.estimation.calibration import Calibration, CalibrationReport
from perf.feature_labels import Floats, Labels

_SMALLEST = 1e-7
"""As in `Calibration`."""
_NORMAL_95 = 1.96


def calibration(labels: Labels, predicted: Floats, chosen: NDArray[np.bool_] | None = None) -> Calibration:
    """The estimator's own account of the predictions, of all labels or the chosen ones; see there for the ECE."""
    rows = np.arange(len(labels)) if chosen is None else np.flatnonzero(chosen)
    probability, accepted, labelled = np.zeros((3, len(rows), labels.num_positions), dtype=np.float32)
    place = (np.arange(len(rows)), labels.position[rows])
    probability[place], accepted[place], labelled[place] = predicted[rows], labels.accepted[rows], 1
    result = Calibration(labels.num_positions)
    result.update(probability, accepted, labelled)
    return result


def quality(
    labels: Labels,
    predicted: Floats,
    position: int | None = None,
    chosen: NDArray[np.bool_] | None = None,
    group: NDArray[np.int64] | None = None,
) -> CalibrationReport:
    """Quality of all predictions or the chosen ones, of all positions or one.

    The AUC is exact, not binned, and compares within groups of labels where there are any: see `auc`.
    """
    counted = np.ones(len(labels), dtype=bool) if chosen is None else chosen
    if position is not None:
        counted = counted & (labels.position == position)
    report = calibration(labels, predicted, counted).report()
    group = np.zeros(len(labels), dtype=np.int64) if group is None else group
    return dataclasses.replace(report, auc=auc(predicted[counted], labels.accepted[counted], group[counted]))


def auc(predicted: Floats, accepted: NDArray[np.bool_], group: NDArray[np.int64]) -> float | None:
    """Probability that an accepted draft was predicted above a rejected one of its group, a tie counting half.

    Cross-validated predictions are compared within their fold: every fold has another fit, whose intercepts are the
    lower the more of the fold was accepted, so comparing across folds finds less than there is. None without pairs.
    """
    in_order, pairs = 0.0, 0
    for number in np.unique(group):
        accepted_here = accepted[group == number]
        num_accepted = int(accepted_here.sum())
        _, value, ties = np.unique(predicted[group == number], return_inverse=True, return_counts=True)
        mean_rank = ties.cumsum() - (ties - 1) / 2
        in_order += float(mean_rank[value][accepted_here].sum()) - num_accepted * (num_accepted + 1) / 2
        pairs += num_accepted * (len(accepted_here) - num_accepted)
    return in_order / pairs if pairs else None


class Difference(NamedTuple):
    """Of two predictions' log-losses, the first less the second."""

    mean: float
    half_width: float
    """Of the 95 % interval; requests are independent, the drafts of one are not."""


def log_loss_difference(
    labels: Labels, first: Floats, second: Floats, chosen: NDArray[np.bool_] | None = None
) -> Difference | None:
    """Paired, over all labels or the chosen ones; None where there are none."""
    counted = np.ones(len(labels), dtype=bool) if chosen is None else chosen
    if not counted.any():
        return None
    losses = [_log_loss(labels.accepted[counted], predicted[counted]) for predicted in (first, second)]
    request = labels.request[counted]
    by_request = np.bincount(request, losses[0] - losses[1])
    num_labels = np.bincount(request)
    mean = by_request.sum() / num_labels.sum()
    deviation = by_request - mean * num_labels  # of a ratio of two sums over requests
    return Difference(float(mean), float(_NORMAL_95 * np.sqrt((deviation**2).sum()) / num_labels.sum()))


def _log_loss(accepted: NDArray[np.bool_], predicted: Floats) -> Floats:
    return -np.log(np.maximum(np.where(accepted, predicted, 1 - predicted), _SMALLEST))

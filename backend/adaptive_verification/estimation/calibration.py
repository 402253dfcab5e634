"""How good the predictions have been: AUC, log-loss and expected calibration error, by position and overall.

Predictions are counted as they were made, before their labels were known. Memory is O(K x bins), fading with a
half-life so that the numbers speak of today's traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 200
"""Bins of equal width for the AUC. Predictions in the same bin count as tied."""
BINS_PER_RELIABILITY_BIN = 20
"""Ten reliability bins for the calibration error, as is usual."""
_SMALLEST = 1e-7
_LARGEST_WEIGHT = 1e6
_STEPS_ADDED_TOGETHER = 16
"""A dozen small operations are added up for so many steps at once, not for each."""


@dataclass(frozen=True)
class CalibrationReport:
    """Quality of the predictions for some positions. None where there is nothing to say it from."""

    labels: float
    acceptance_rate: float | None
    auc: float | None
    log_loss: float | None
    calibration_error: float | None


class Calibration:
    """Running quality of the predictions.

    Args:
        num_positions: K.
        half_life_steps: labelled steps after which old labels count half; 0: they never fade.
    """

    def __init__(self, num_positions: int, half_life_steps: float = 0.0) -> None:
        # Instead of fading everything in every step, the newest step weighs more.
        self._growth = 2.0 ** (1 / half_life_steps) if half_life_steps > 0 else 1.0
        self._weight = 1.0
        self._counts = np.zeros((2, num_positions, NUM_BINS))  # [label, K, bins]
        self._predicted = np.zeros((num_positions, NUM_BINS))  # sums of the predictions
        self._log_loss = np.zeros(num_positions)
        # labelled steps that are not in the sums yet: predictions, labels, and what was decided
        self._waiting: list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]] = []

    def update(
        self, probability: NDArray[np.float32], accepted: NDArray[np.float32], labelled: NDArray[np.float32]
    ) -> None:
        """Counts one step's labels. All `[rows, K]`: predictions when the drafts were scored, 0 or 1, 0 or 1.

        The arrays may be kept for some steps.
        """
        if np.count_nonzero(labelled):
            self._waiting.append((probability, accepted, labelled))
            if len(self._waiting) >= _STEPS_ADDED_TOGETHER:
                self._add_waiting()

    def _add_waiting(self) -> None:
        """Brings the sums up to date."""
        if not self._waiting:
            return
        probability, accepted, labelled = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
        rows_of_step = [len(labelled) for _, _, labelled in self._waiting]
        weights = self._weight * self._growth ** np.arange(1, len(rows_of_step) + 1)
        self._weight, self._waiting = float(weights[-1]), []
        row, position = labelled.nonzero()
        weight = weights.repeat(rows_of_step)[row]
        predicted, label = probability[row, position].astype(np.float64), accepted[row, position].astype(np.int64)
        cell = position * NUM_BINS + np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        _add_at(self._counts, label * self._predicted.size + cell, weight)
        _add_at(self._predicted, cell, predicted * weight)
        loss = -np.log(np.maximum(np.where(label > 0, predicted, 1 - predicted), _SMALLEST))
        _add_at(self._log_loss, position, loss * weight)
        if self._weight > _LARGEST_WEIGHT:
            self._fade(1 / self._weight)

    def _fade(self, factor: float) -> None:
        self._weight *= factor
        for total in (self._counts, self._predicted, self._log_loss):
            total *= factor

    def report(self, position: int | None = None) -> CalibrationReport:
        """Quality at one position, or overall."""
        self._add_waiting()
        chosen = slice(None) if position is None else slice(position, position + 1)
        rejected, accepted = self._counts[:, chosen].sum(1) / self._weight  # [bins] each
        labels = float(rejected.sum() + accepted.sum())
        if labels <= 0:
            return CalibrationReport(0.0, None, None, None, None)
        pairs = float(rejected.sum() * accepted.sum())
        ranked_right = float((accepted * (rejected.cumsum() - rejected / 2)).sum())
        surplus = accepted - self._predicted[chosen].sum(0) / self._weight
        by_reliability_bin = surplus.reshape(-1, BINS_PER_RELIABILITY_BIN).sum(1)
        return CalibrationReport(
            labels=labels,
            acceptance_rate=float(accepted.sum()) / labels,
            auc=ranked_right / pairs if pairs > 0 else None,
            log_loss=float(self._log_loss[chosen].sum()) / self._weight / labels,
            calibration_error=float(np.abs(by_reliability_bin).sum()) / labels,
        )

    def reliability(self) -> list[tuple[float, float, float]]:
        """For each reliability bin with labels: mean prediction, acceptance rate, labels."""
        self._add_waiting()
        merged = [
            values.reshape(-1, BINS_PER_RELIABILITY_BIN).sum(1)
            for values in (self._predicted.sum(0), self._counts[1].sum(0), self._counts.sum((0, 1)))
        ]
        triples = zip(*(values.tolist() for values in merged), strict=True)
        return [(predicted / n, accepted / n, n / self._weight) for predicted, accepted, n in triples if n > 0]

    def state_dict(self) -> dict[str, Any]:
        """Only the bins that hold something: most do not."""
        self._add_waiting()
        self._fade(1 / self._weight)
        state: dict[str, Any] = {"log_loss": self._log_loss.tolist()}
        for name, values in (("counts", self._counts), ("predicted", self._predicted)):
            filled = np.flatnonzero(values)
            state[name] = {"index": filled.tolist(), "value": values.ravel()[filled].tolist()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; nothing has changed then.
        """
        counts = _from_filled("counts", state["counts"], self._counts.shape)
        predicted = _from_filled("predicted", state["predicted"], self._predicted.shape)
        log_loss = np.asarray(state["log_loss"], dtype=np.float64)
        if log_loss.shape != self._log_loss.shape or not np.isfinite(log_loss).all():
            raise ValueError(f"log_loss must be {self._log_loss.size} finite numbers")
        self._counts, self._predicted, self._log_loss, self._weight = counts, predicted, log_loss, 1.0
        self._waiting = []


def _add_at(total: NDArray[np.float64], cell: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    """Adds each value to its cell of `total`, taken as flat."""
    total += np.bincount(cell, values, total.size).reshape(total.shape)


def _from_filled(name: str, filled: Mapping[str, Any], shape: tuple[int, ...]) -> NDArray[np.float64]:
    index, value = np.asarray(filled["index"], dtype=np.int64), np.asarray(filled["value"], dtype=np.float64)
    values = np.zeros(shape)
    if index.shape != value.shape or not np.isfinite(value).all() or (value < 0).any():
        raise ValueError(f"calibration {name} must be finite numbers of at least 0, one for each index")
    if index.size and not (index.min() >= 0 and index.max() < values.size):
        raise ValueError(f"calibration {name} has an index outside 0..{values.size - 1}")
    values.ravel()[index] = value
    return values

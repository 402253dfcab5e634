"""A recorded stream of the estimator's evidence, and what a fit makes of it.

    {
      "constants": {"init_slope", "init_intercept", "refit_interval", "damping_observations", "l2", "max_log_odds",
                    "feature", "evidence"},                   the last two may be missing: logit_q_max, none
      "num_speculative_tokens": K,
      "draft_features": [3],                                  their names, in order
      "steps": [{"features": [rows][K], "draft_features": [rows][K][3], "admitted": [rows], "accepted": [rows],
                 "sequences": [rows]}, ...],
      "coefficients": [{"after_steps", "slope", "intercepts", "history"}, ...]
    }

A step holds the rows whose labels one fold brings: `features` are the log-odds of the drafter's most likely token, of
which the first `admitted` count, and `draft_features` (missing where the drafter sent none) what else it measured;
`sequences` (missing in traces of others) tells whose history a row continues. There is a step for every fold, also
where it has no rows. `coefficients` are those of whoever made the trace.

This module knows the format and the offline fit; `recording` makes traces of a running server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from adaptive_verification.errors import TraceError
from adaptive_verification.estimation.calibration import Calibration
from adaptive_verification.estimation.evidence import history_feature, history_increments
from adaptive_verification.estimation.features import DRAFT_FEATURES, MAX_LOG_ODDS, Feature, serving_feature
from adaptive_verification.estimation.online_fit import INITIAL_INTERCEPT, INITIAL_SLOPE, RIDGE, OnlineFit
from adaptive_verification.estimation.sequences import SequenceMemory


class TraceConstants(BaseModel):
    """What the fit of a trace is made with. The names are the file's."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    refit_interval: int = Field(ge=1)
    damping_observations: float = Field(ge=0)
    init_slope: float = INITIAL_SLOPE
    init_intercept: float = INITIAL_INTERCEPT
    l2: float = Field(RIDGE, gt=0)
    max_log_odds: float = Field(MAX_LOG_ODDS, gt=0)
    feature: str = "logit_q_max"
    evidence: Literal["none", "history"] = "none"


@dataclass(frozen=True)
class TraceStep:
    """The labels of one fold."""

    log_odds: NDArray[np.float32]
    """`[rows, K]`"""
    admitted: NDArray[np.int64]
    """`[rows]`"""
    accepted: NDArray[np.int64]
    """`[rows]`, at most `admitted`"""
    sequences: list[int] | None
    draft_features: NDArray[np.float32] | None
    """`[rows, K, 3]`, see `features.DRAFT_FEATURES`"""

    def labels(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which drafts the target accepted, and which it decided: the accepted ones and the first rejected; `[rows, K]`
        each."""
        position = np.arange(self.log_odds.shape[1])
        decided = np.minimum(self.accepted + 1, self.admitted)
        return position < self.accepted[:, None], position < decided[:, None]


@dataclass(frozen=True)
class Trace:
    constants: TraceConstants
    num_positions: int
    steps: list[TraceStep]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Reads and validates a file.

        Raises:
            TraceError: it is missing or damaged; the message says where.
        """
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise TraceError(f"there is no file {path}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{path} cannot be read: {error}") from None
        try:
            return cls.from_json(content)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path} is no trace: {error if isinstance(error, ValueError) else repr(error)}") from None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Trace:
        """Raises ValueError, KeyError or TypeError where the content is not a trace."""
        constants = TraceConstants.model_validate(content["constants"])
        num_positions = content["num_speculative_tokens"]
        if not (isinstance(num_positions, int) and num_positions >= 1):
            raise TraceError(f"num_speculative_tokens={num_positions!r} must be a number of at least 1")
        steps = [_step(number, step, num_positions) for number, step in enumerate(content["steps"])]
        return cls(constants, num_positions, steps)


def _step(number: int, step: Mapping[str, Any], num_positions: int) -> TraceStep:
    admitted, accepted = np.asarray(step["admitted"], dtype=np.int64), np.asarray(step["accepted"], dtype=np.int64)
    sequences = step.get("sequences")
    rows = len(admitted)
    log_odds = np.asarray(step["features"], dtype=np.float32).reshape(rows, num_positions if rows == 0 else -1)
    if log_odds.shape != (rows, num_positions) or not np.isfinite(log_odds).all():
        raise TraceError(f"steps[{number}].features must be {rows} rows of {num_positions} finite numbers")
    if accepted.shape != (rows,) or (accepted < 0).any() or (accepted > admitted).any():
        raise TraceError(f"steps[{number}].accepted must be {rows} numbers of at least 0, at most those of admitted")
    if (admitted > num_positions).any():
        raise TraceError(f"steps[{number}].admitted must be at most num_speculative_tokens={num_positions}")
    if sequences is not None and (len(sequences) != rows or len(set(sequences)) != rows):
        raise TraceError(f"steps[{number}].sequences must be {rows} different numbers")
    return TraceStep(log_odds, admitted, accepted, sequences, _draft_features(number, step, rows, num_positions))


def _draft_features(number: int, step: Mapping[str, Any], rows: int, num_positions: int) -> NDArray[np.float32] | None:
    if "draft_features" not in step:
        return None
    shape = (rows, num_positions, len(DRAFT_FEATURES))
    values = np.asarray(step["draft_features"], dtype=np.float32).reshape(shape if rows == 0 else (rows, -1))
    if values.size != np.prod(shape) or not np.isfinite(values).all():
        raise TraceError(f"steps[{number}].draft_features must be {rows} rows of {shape[1]} times {shape[2]} numbers")
    return values.reshape(shape)


def coefficients(fit: OnlineFit, after_steps: int) -> dict[str, Any]:
    """A fit's coefficients as traces have them."""
    shared = fit.shared.tolist()
    history = {"history": shared[1]} if len(shared) > 1 else {}
    return {"after_steps": after_steps, "slope": shared[0], **history, "intercepts": fit.intercepts.tolist()}


@dataclass(frozen=True)
class Replay:
    coefficients: list[dict[str, Any]]
    """After each refit."""
    calibration: Calibration
    """Of the predictions as they would have been made: by the fit before a block's labels were folded in."""
    predictions: list[NDArray[np.float32]]
    """These predictions, for each step `[rows, K]`."""


def replay(trace: Trace, constants: TraceConstants) -> Replay:
    """Feeds a trace to the estimator's own fit, from a cold start.

    Args:
        trace: its own constants do not matter.
        constants: the settings to try.

    Raises:
        SettingsError: the feature is not one that can be served.
        TraceError: as `replay_feature`.
    """
    return replay_feature(trace, constants, serving_feature(constants.feature))


def replay_feature(trace: Trace, constants: TraceConstants, feature: Feature) -> Replay:
    """The same with any feature in the place of the constants' own: studies look at lossy ones too.

    Raises:
        TraceError: the request's history is asked for, and the trace does not tell the requests apart; or the feature
            needs what the trace's drafter did not measure.
    """
    uses_history = constants.evidence == "history" and feature.fitted
    if uses_history and any(step.sequences is None for step in trace.steps):
        raise TraceError("evidence=history needs `sequences` in every step; this trace has none")
    if feature.source is not None and any(step.draft_features is None for step in trace.steps):
        raise TraceError(
            f"feature={feature.name!r} needs `draft_features` in every step; record with the drafter's "
            "draft_features=all"
        )
    fit = OnlineFit(
        trace.num_positions,
        2 if uses_history else 1,
        refit_interval=constants.refit_interval,
        damping_labels=constants.damping_observations,
        initial_slope=constants.init_slope,
        initial_intercept=constants.init_intercept,
        ridge=constants.l2,
    )
    known_sequences = {sequence for step in trace.steps for sequence in step.sequences or ()}
    memory = SequenceMemory(max(1, len(known_sequences)), 1)
    calibration = Calibration(trace.num_positions)
    refits, predictions = [], []
    for folds, step in enumerate(trace.steps, start=1):
        log_odds = step.log_odds.clip(-constants.max_log_odds, constants.max_log_odds)
        accepted, labelled = (labels.astype(np.float32) for labels in step.labels())
        draft_features = None if step.draft_features is None else torch.from_numpy(step.draft_features)
        design = torch.zeros(*log_odds.shape, fit.num_shared)
        design[..., 0] = feature(torch.from_numpy(log_odds), draft_features)
        if not feature.fitted:
            predictions.append(torch.sigmoid(design[..., 0]).numpy())
            calibration.update(predictions[-1], accepted, labelled)
            continue
        if uses_history:
            slots, _ = memory.slots(step.sequences or [])
            unaided = fit.predict(design).numpy()
            history = history_feature(memory.residual_sum[slots], memory.information_sum[slots])
            design[..., 1] = torch.from_numpy(history)[:, None]
            residual, information = history_increments(unaided, accepted, labelled)
            memory.residual_sum[slots] += residual
            memory.information_sum[slots] += information
        predictions.append(fit.predict(design).numpy())
        calibration.update(predictions[-1], accepted, labelled)
        if fit.fold(design, torch.from_numpy(accepted), torch.from_numpy(labelled)):
            refits.append(coefficients(fit, folds))
    return Replay(refits, calibration, predictions)

"""What an estimator knows about itself, as plain numbers: for its metrics and for the command line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaptive_verification.estimation.calibration import CalibrationReport
from adaptive_verification.estimation.draft_counts import ACCEPTED, ADMITTED, DRAFTED
from adaptive_verification.estimation.stage import EstimatorStage


@dataclass(frozen=True)
class LookupReport:
    """Looked-up drafts of all positions since the state began; the positions' counts have them too."""

    drafted: int
    admitted: int
    accepted: int


@dataclass(frozen=True)
class PositionReport:
    """One draft position. Drafts are counted since the state began, the calibration fades."""

    intercept: float | None
    """None where the feature is used without a fit."""
    drafted: int
    admitted: int
    accepted: int
    calibration: CalibrationReport


@dataclass(frozen=True)
class EstimatorReport:
    steps: int
    refits: int
    slope: float | None
    """None where the feature is used without a fit."""
    history: float | None
    """The coefficient of the request's own history; None where it is not used."""
    budget: int
    """Of the last step, as the next."""
    depth: int
    calibration: CalibrationReport
    positions: tuple[PositionReport, ...]
    """Those up to the deepest that was ever drafted."""
    lookup: LookupReport


def report(stage: EstimatorStage) -> EstimatorReport:
    """The stage's numbers at this moment; no step may run meanwhile."""
    drafted_positions = np.flatnonzero(stage.counts.by_position[DRAFTED])
    num_positions = int(drafted_positions[-1]) + 1 if drafted_positions.size else 0
    shared, intercepts = stage.fit.shared.tolist(), stage.fit.intercepts.tolist()
    counts = stage.counts.by_position.tolist()
    return EstimatorReport(
        steps=stage.steps,
        refits=stage.fit.refits,
        slope=shared[0] if stage.is_fitted else None,
        history=shared[1] if stage.uses_history else None,
        budget=stage.last_budget,
        depth=stage.last_depth,
        calibration=stage.calibration.report(),
        positions=tuple(
            PositionReport(
                intercept=intercepts[position] if stage.is_fitted else None,
                drafted=counts[DRAFTED][position],
                admitted=counts[ADMITTED][position],
                accepted=counts[ACCEPTED][position],
                calibration=stage.calibration.report(position),
            )
            for position in range(num_positions)
        ),
        lookup=LookupReport(*(int(stage.counts.looked_up[kind]) for kind in (DRAFTED, ADMITTED, ACCEPTED))),
    )

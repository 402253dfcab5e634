"""An estimator's state as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaptive_verification.estimation.calibration import CalibrationReport
from adaptive_verification.estimation.report import report
from adaptive_verification.estimation.stage import EstimatorStage

_NONE = "-"


def state_table(fingerprint: Mapping[str, Any], stage: EstimatorStage) -> str:
    """All that the state holds: coefficients, counts, calibration, cost curves."""
    numbers = report(stage)
    lines = [", ".join(f"{name} {value}" for name, value in fingerprint.items()), ""]
    lines.append(f"steps {numbers.steps}, refits {numbers.refits}")
    lines.append(f"slope {_number(numbers.slope)}, history coefficient {_number(numbers.history)}")
    header = ["position", "intercept", "drafted", "admitted", "accepted", "labels", "rate", "AUC", "log-loss", "ECE"]
    rows = [
        [
            str(number),
            _number(position.intercept),
            *map(str, (position.drafted, position.admitted, position.accepted)),
            *_calibration(position.calibration),
        ]
        for number, position in enumerate(numbers.positions, start=1)
    ]
    totals = [str(sum(getattr(p, kind) for p in numbers.positions)) for kind in ("drafted", "admitted", "accepted")]
    rows.append(["all", "", *totals, *_calibration(numbers.calibration)])
    lookup = numbers.lookup
    if lookup.drafted:
        rows.append(["looked up", "", *map(str, (lookup.drafted, lookup.admitted, lookup.accepted)), *[""] * 5])
    lines += ["", *_aligned([header, *rows]), ""]
    lines.append("Labels, rate (accepted of them), AUC, log-loss and ECE are of recent traffic; the counts are of all.")
    if lookup.drafted:
        lines.append("What was looked up is in the counts, and not in the rest: the fit does not predict it.")
    if not stage.costs.curves:
        lines += ["", "No cost curves: nothing has been measured yet, so nothing is trimmed."]
        return "\n".join(lines)
    lines += ["", f"Costs in milliseconds; beside the stages a step takes {_number(stage.costs.other_ms)}."]
    for name, curve in stage.costs.curves.items():
        measured = [name, *(f"{size:g}" for size in curve.measured.sizes)]
        at_load = ["at load", *(f"{milliseconds:.2f}" for milliseconds in curve.measured.milliseconds)]
        live = ["now", *(f"{milliseconds:.2f}" for milliseconds in curve.milliseconds)]
        lines += ["", *_aligned([measured, at_load, live])]
    return "\n".join(lines)


def _calibration(calibration: CalibrationReport) -> list[str]:
    values = (calibration.acceptance_rate, calibration.auc, calibration.log_loss, calibration.calibration_error)
    return [f"{calibration.labels:.0f}", *map(_number, values)]


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]

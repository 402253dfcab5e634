"""An estimator's state as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptive_verification.errors import SetupError, StateError
from adaptive_verification.estimation.report import EstimatorReport, report
from adaptive_verification.estimation.stage import EstimatorStage


def draw_state(fingerprint: Mapping[str, Any], stage: EstimatorStage, file: Path) -> None:
    """Draws counts, intercepts, reliability and cost curves to a PNG file.

    Raises:
        SetupError: matplotlib is not installed.
        StateError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError(
            "Drawing needs matplotlib: pip install matplotlib, or 'adaptive-verification[plot]'."
        ) from None
    numbers = report(stage)
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(
        f"{fingerprint.get('target')} / {fingerprint.get('drafter')}: {numbers.steps} steps, {numbers.refits} refits"
    )
    ((counts, intercepts), (reliability, costs)) = figure.subplots(2, 2)
    _draw_counts(counts, numbers)
    _draw_intercepts(intercepts, numbers)
    _draw_reliability(reliability, stage)
    _draw_costs(costs, stage)
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error}") from None


def _draw_counts(axes: Any, numbers: EstimatorReport) -> None:
    positions = range(1, len(numbers.positions) + 1)
    for shift, kind in enumerate(("drafted", "admitted", "accepted")):
        values = [getattr(position, kind) for position in numbers.positions]
        axes.bar([position + 0.27 * (shift - 1) for position in positions], values, width=0.27, label=kind)
    axes.set(title="Drafts by position", xlabel="position", ylabel="drafts", xticks=list(positions))
    axes.legend()


def _draw_intercepts(axes: Any, numbers: EstimatorReport) -> None:
    known = [(n, p.intercept) for n, p in enumerate(numbers.positions, start=1) if p.intercept is not None]
    axes.plot([n for n, _ in known], [intercept for _, intercept in known], marker="o")
    slope = "no fit" if numbers.slope is None else f"slope {numbers.slope:.3f}"
    history = "" if numbers.history is None else f", history coefficient {numbers.history:.3f}"
    axes.set(title=f"Intercepts; {slope}{history}", xlabel="position", ylabel="log-odds")
    axes.set_xticks([n for n, _ in known])
    axes.axhline(0, color="grey", linewidth=0.8)


def _draw_reliability(axes: Any, stage: EstimatorStage) -> None:
    overall, triples = stage.calibration.report(), stage.calibration.reliability()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.plot([predicted for predicted, _, _ in triples], [rate for _, rate, _ in triples], marker="o")
    quality = "no labels yet"
    if overall.log_loss is not None and overall.calibration_error is not None:
        auc = "-" if overall.auc is None else f"{overall.auc:.3f}"
        quality = f"AUC {auc}, log-loss {overall.log_loss:.3f}, ECE {overall.calibration_error:.3f}"
    axes.set(
        title=f"Reliability; {quality}", xlabel="predicted acceptance", ylabel="accepted", xlim=(0, 1), ylim=(0, 1)
    )


def _draw_costs(axes: Any, stage: EstimatorStage) -> None:
    for name, curve in stage.costs.curves.items():
        (line,) = axes.plot(curve.measured.sizes, curve.milliseconds, marker="o", label=f"{name}, now")
        axes.plot(
            curve.measured.sizes, curve.measured.milliseconds, "--", color=line.get_color(), label=f"{name}, at load"
        )
    axes.set(title="Costs", xlabel="tokens (draft_extend: rows)", ylabel="milliseconds", xscale="log", yscale="log")
    if stage.costs.curves:
        axes.legend(fontsize="small")

"""The feature study as pictures: a reliability diagram, and the AUC by position."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from adaptive_verification.estimation.features import FEATURES
from perf.feature_quality import calibration
from perf.feature_report import DEFAULT_FEATURE, OFFLINE, ONLINE, Predictor, Study, shown


def draw_reliability(study: Study, file: Path, provenance: str) -> None:
    """Acceptance rate against prediction, in ten bins of equal width, and under it how many labels are in each."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    upper.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for predictor in shown(study, ONLINE):
        bins = calibration(study.labels, study.predictions[predictor]).reliability()
        predicted, accepted, _ = zip(*bins, strict=True)
        upper.plot(predicted, accepted, marker="o", markersize=3, label=predictor.name, **_style(predictor))
    for history in (False, True):
        predictor = Predictor(DEFAULT_FEATURE, history, ONLINE)
        predicted, _, labels = zip(*calibration(study.labels, study.predictions[predictor]).reliability(), strict=True)
        lower.plot(predicted, labels, marker="o", markersize=3, label=predictor.name, **_style(predictor))
    upper.set(ylabel="acceptance rate", title="Online predictions, made before their labels were known")
    upper.legend(fontsize="small")
    lower.set(xlabel="predicted acceptance", ylabel="labels", yscale="log", xlim=(0, 1))
    lower.legend(fontsize="small")
    _save(figure, file, provenance)


def draw_auc_by_position(study: Study, file: Path, provenance: str) -> None:
    """AUC within each position, a line for each feature."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    positions = range(study.labels.num_positions)
    for predictor in shown(study, OFFLINE):
        values = [study.quality(predictor, position).auc for position in positions]
        points = [(position + 1, value) for position, value in zip(positions, values, strict=True) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=predictor.name, **_style(predictor))
    axes.axhline(0.5, color="grey", linewidth=0.8)
    axes.set(xlabel="draft position", ylabel="AUC", title="Offline, fitted to other requests")
    axes.set_xticks([position + 1 for position in positions])
    axes.legend(fontsize="small")
    _save(figure, file, provenance)


def _style(predictor: Predictor) -> dict[str, Any]:
    if predictor.feature == DEFAULT_FEATURE:
        return {"color": "black", "linewidth": 2.5 if predictor.history else 1.5, "zorder": 3}
    return {"linewidth": 1, "linestyle": "-" if FEATURES[predictor.feature].lossless else ":"}


def _save(figure: Figure, file: Path, provenance: str) -> None:
    figure.supxlabel("\n".join(textwrap.wrap(provenance, 130)), fontsize=6, color="grey")
    figure.savefig(file, format="png", dpi=120)

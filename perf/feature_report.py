"""The feature study's numbers: every feature's quality, the online fit against the best offline one, and the history.

Pure functions of a stream and its labels; they know files only by writing the CSV.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from adaptive_verification.estimation.calibration import CalibrationReport
from adaptive_verification.estimation.features import FEATURES
from adaptive_verification.estimation.stage import COLD_REFITS
from adaptive_verification.estimation.trace import Trace
from perf.feature_fits import FOLDS, fold_of, predict_offline, predict_online
from perf.feature_labels import Floats, Labels
from perf.feature_quality import Difference, log_loss_difference, quality

DEFAULT_FEATURE = "logit_q_max"
STUDIED = tuple(name for name in FEATURES if name != "drafter_score")
"""Of a drafter without a confidence head `drafter_score` is `q_max_unfitted`."""
OFFLINE, IN_SAMPLE, ONLINE = f"offline, {FOLDS}-fold", "offline, same labels", "online"
"""Offline: fitted to the other requests; or to the very labels that it predicts, which no fit of the form can beat.
Online: by the estimator's own fit along the stream, from a cold start."""


@dataclass(frozen=True)
class Predictor:
    """One way of predicting."""

    feature: str
    history: bool
    fit: str

    @property
    def name(self) -> str:
        return f"{self.feature} + history" if self.history else self.feature


@dataclass(frozen=True)
class Study:
    """All predictions of one stream."""

    trace: Trace
    labels: Labels
    predictions: dict[Predictor, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace) -> Study:
        """Predicts every label in every way.

        Raises:
            TraceError: the trace has no labels, or lacks requests or what the drafter measured.
        """
        study = cls(trace, Labels.of(trace))
        for predictor in tqdm(list(_predictors()), unit="fit"):
            study.predictions[predictor] = study._predict(predictor)
        return study

    def _predict(self, predictor: Predictor) -> Floats:
        feature = FEATURES[predictor.feature]
        if predictor.fit == ONLINE:
            return predict_online(self.trace, feature, with_history=predictor.history)
        folds = FOLDS if predictor.fit == OFFLINE else 1
        return predict_offline(self.labels, feature, with_history=predictor.history, folds=folds)

    @property
    def warm_from(self) -> int:
        """The step from which on the online fit rests on as many refits as make one of its first guess."""
        return COLD_REFITS * self.trace.constants.refit_interval

    def quality(self, predictor: Predictor, position: int | None = None, *, warm: bool = False) -> CalibrationReport:
        chosen = self.labels.step >= self.warm_from if warm else None
        group = fold_of(self.labels) if predictor.fit == OFFLINE else None
        return quality(self.labels, self.predictions[predictor], position, chosen, group)

    def difference(self, first: Predictor, second: Predictor, *, warm: bool = False) -> Difference | None:
        chosen = self.labels.step >= self.warm_from if warm else None
        return log_loss_difference(self.labels, self.predictions[first], self.predictions[second], chosen)


def shown(study: Study, fit: str) -> list[Predictor]:
    """What tables and pictures show of a fit: every feature, the default one with history too."""
    return [
        predictor
        for predictor in study.predictions
        if (predictor.fit == fit or not FEATURES[predictor.feature].fitted)
        and (not predictor.history or predictor.feature == DEFAULT_FEATURE)
    ]


def write_csv(study: Study, file: Path) -> None:
    """A line for every predictor and position, and one for all positions."""
    numbers = [item.name for item in dataclasses.fields(CalibrationReport)]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["feature", "lossless", "history", "fit", "position", *numbers])
        for predictor in study.predictions:
            for position in (None, *range(study.labels.num_positions)):
                report = study.quality(predictor, position)
                values = (getattr(report, name) for name in numbers)
                writer.writerow(
                    [
                        predictor.feature,
                        FEATURES[predictor.feature].lossless,
                        predictor.history,
                        predictor.fit,
                        "all" if position is None else position + 1,
                        *("" if value is None else f"{value:.6g}" for value in values),
                    ]
                )


def markdown(study: Study) -> str:
    """All tables."""
    labels = study.labels
    return "\n".join(
        [
            f"{len(labels):,} labelled drafts of {labels.num_requests:,} requests, "
            f"acceptance rate {labels.accepted.mean():.4f}.",
            "",
            "## Features",
            "",
            f"Offline: fitted to other requests ({FOLDS} folds). Online: the estimator's own fit along the stream, "
            "from a cold start. A feature that is not lossless looks at the drawn token: for studies only.",
            "",
            *_feature_table(study),
            "",
            "## The online fit against the best offline fit",
            "",
            "Log-loss; differences are the online fit's less the offline fit's to the same labels, with their 95 % "
            f"intervals over requests. Warm: after the first {COLD_REFITS} refits ({study.warm_from} steps).",
            "",
            *_online_table(study),
            "",
            "## What the request's own history brings",
            "",
            "Differences are those with history less those without.",
            "",
            *_history_table(study),
            "",
            "## By position",
            "",
            "Offline, fitted to other requests.",
            "",
            *_position_tables(study),
        ]
    )


def _predictors() -> Iterator[Predictor]:
    for name in STUDIED:
        if not FEATURES[name].fitted:
            yield Predictor(name, False, OFFLINE)
            continue
        for with_history in (False, True):
            for fit in (OFFLINE, IN_SAMPLE, ONLINE):
                yield Predictor(name, with_history, fit)


def _feature_table(study: Study) -> list[str]:
    lines = _header("feature", "lossless", "AUC", "log-loss", "ECE", "AUC online", "log-loss online", "ECE online")
    for predictor in shown(study, OFFLINE):
        feature = FEATURES[predictor.feature]
        online = dataclasses.replace(predictor, fit=ONLINE)
        reports = [study.quality(predictor), *([study.quality(online)] if feature.fitted else [])]
        values = [_three(report) for report in reports] + [[""] * 3] * (2 - len(reports))
        lines.append(_row(predictor.name, "yes" if feature.lossless else "**no**", *values[0], *values[1]))
    return lines


def _online_table(study: Study) -> list[str]:
    lines = _header("prediction", "labels", "online", OFFLINE, IN_SAMPLE, "difference")
    for history in (False, True):
        fits = [Predictor(DEFAULT_FEATURE, history, fit) for fit in (ONLINE, OFFLINE, IN_SAMPLE)]
        for warm in (False, True):
            reports = [study.quality(predictor, warm=warm) for predictor in fits]
            losses = [_number(report.log_loss) for report in reports]
            difference = study.difference(fits[0], fits[2], warm=warm)
            name = f"{fits[0].name}, {'warm' if warm else 'all'}"
            lines.append(_row(name, f"{reports[0].labels:.0f}", *losses, _interval(difference)))
    return lines


def _history_table(study: Study) -> list[str]:
    lines = _header("feature", "fit", "AUC", "with history", "log-loss", "with history", "difference", "ECE",
                    "with history")  # fmt: skip
    for fit in (OFFLINE, ONLINE):
        without, with_it = (Predictor(DEFAULT_FEATURE, history, fit) for history in (False, True))
        columns = list(zip(_three(study.quality(without)), _three(study.quality(with_it)), strict=True))
        difference = _interval(study.difference(with_it, without))
        lines.append(_row(DEFAULT_FEATURE, fit, *columns[0], *columns[1], difference, *columns[2]))
    return lines


def _position_tables(study: Study) -> list[str]:
    positions = range(study.labels.num_positions)
    counts = [np.bincount(study.labels.position[chosen], minlength=len(positions))
              for chosen in (slice(None), study.labels.accepted)]  # fmt: skip
    rates = counts[1] / np.maximum(counts[0], 1)
    columns = [f"{position + 1}" for position in positions]
    lines = _header("", *columns)
    lines += [_row("labels", *counts[0]), _row("acceptance rate", *(f"{rate:.3f}" for rate in rates)), ""]
    measures: dict[str, Callable[[CalibrationReport], float | None]] = {
        "AUC": lambda report: report.auc,
        "log-loss": lambda report: report.log_loss,
        "ECE": lambda report: report.calibration_error,
    }
    for name, measure in measures.items():
        lines += _header(name, *columns)
        for predictor in shown(study, OFFLINE):
            values = (_number(measure(study.quality(predictor, position))) for position in positions)
            lines.append(_row(predictor.name, *values))
        lines.append("")
    return lines


def _three(report: CalibrationReport) -> list[str]:
    return [_number(report.auc), _number(report.log_loss), _number(report.calibration_error)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _interval(difference: Difference | None) -> str:
    return "" if difference is None else f"{difference.mean:+.4f} ± {difference.half_width:.4f}"


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"

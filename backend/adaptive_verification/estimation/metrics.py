"""The estimator's numbers as metrics: how well it predicts, what it has learned, what it decides.

A thread of its own makes and sends them, twice a second at most, so a step pays for a lock only, and the last step
before a pause is seen too. Knows the stage and `serving.metrics`; nothing of how steps come in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from adaptive_verification.contract.messages import Draft, Estimate, StepRequest
from adaptive_verification.estimation.calibration import CalibrationReport
from adaptive_verification.estimation.report import EstimatorReport, report
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.serving.metrics import PUBLISH_INTERVAL_SECONDS, MetricsBackend, MetricSpec

logger = logging.getLogger(__name__)

_POSITION = "; position 1 is the first draft"


def _counter(name: str, text: str) -> MetricSpec:
    return MetricSpec(f"av_estimator_{name}_total", "counter", text)


def _gauge(name: str, text: str) -> MetricSpec:
    return MetricSpec(f"av_estimator_{name}", "gauge", text, label_values=())


def _counter_by_position(name: str, text: str) -> MetricSpec:
    return MetricSpec(f"av_estimator_{name}_total", "counter", text + _POSITION, "position", ())


def _gauge_by_position(name: str, text: str) -> MetricSpec:
    return MetricSpec(f"av_estimator_position_{name}", "gauge", text + _POSITION, "position", ())


METRICS = (
    _counter("steps", "Steps since the kept state began"),
    _counter("refits", "Times that the coefficients were fitted anew, since the kept state began"),
    _counter_by_position("drafted_tokens", "Draft tokens by position"),
    _counter_by_position("admitted_tokens", "Draft tokens admitted to verification, by position"),
    _counter_by_position("accepted_tokens", "Draft tokens accepted by the target, by position"),
    _counter("looked_up_drafted_tokens", "Draft tokens that were looked up in their own sequences"),
    _counter("looked_up_admitted_tokens", "Those of them admitted to verification"),
    _counter("looked_up_accepted_tokens", "Those of them accepted by the target"),
    _gauge("budget", "Draft tokens that the last step would verify at most"),
    _gauge("planned_depth", "Draft tokens per sequence planned by the last step"),
    _gauge("slope", "Coefficient of the draft's feature"),
    _gauge("history_coefficient", "Coefficient of the request's own history"),
    _gauge("labels", "Recent labels (drafts that the target decided) that the calibration rests on"),
    _gauge("auc", "Probability that an accepted draft was predicted above a rejected one"),
    _gauge("log_loss", "Mean negative log-likelihood of the labels, in nats"),
    _gauge("calibration_error", "Expected calibration error (ECE): mean distance of prediction and acceptance rate"),
    _gauge_by_position("intercept", "Intercept of the fit by position"),
    _gauge_by_position("labels", "As av_estimator_labels, by position"),
    _gauge_by_position("auc", "As av_estimator_auc, by position"),
    _gauge_by_position("log_loss", "As av_estimator_log_loss, by position"),
    _gauge_by_position("calibration_error", "As av_estimator_calibration_error, by position"),
)
_COUNTERS = frozenset(spec.name for spec in METRICS if spec.kind == "counter")


class MeteredEstimator:
    """An estimator stage whose numbers are published. The only caller of the stage's `step`.

    Args:
        stage: owned from here on.
        backend: gets the values; used by this object's thread alone.
        interval_s: shortest time between two publications.
    """

    def __init__(
        self, stage: EstimatorStage, backend: MetricsBackend, *, interval_s: float = PUBLISH_INTERVAL_SECONDS
    ) -> None:
        self._stage = stage
        self._backend = backend
        self._interval_s = interval_s
        self._published: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()  # no report in the middle of a step
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="estimator-metrics", daemon=True)
        self._changed.set()  # the kept state's numbers are there before the first step
        self._thread.start()

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        """The stage's own."""
        with self._lock:
            estimate = self._stage.step(request, draft)
        self._changed.set()
        return estimate

    def close(self) -> None:
        """Ends the thread and closes the stage. At unload."""
        self._closing.set()
        self._changed.set()
        self._thread.join()
        self._stage.close()

    def _run(self) -> None:
        try:
            while self._changed.wait() and not self._closing.is_set():
                self._changed.clear()
                with self._lock:
                    present = report(self._stage)
                self._publish(present)
                self._closing.wait(self._interval_s)
        except Exception:
            logger.exception("the estimator's metrics could not be published; none will be from here on")

    def _publish(self, present: EstimatorReport) -> None:
        for name, label_value, value in _values(present):
            before = self._published.get((name, label_value))
            if value is None or value == before:
                continue
            if name in _COUNTERS:
                self._backend.increment(name, label_value, value - (before or 0.0))
            else:
                self._backend.set(name, label_value, value)
            self._published[name, label_value] = value


def _values(present: EstimatorReport) -> Iterator[tuple[str, str, float | None]]:
    """(metric, label value, value) of all that is known; the value is None where there is none yet.

    The steps come last: whoever sees their number sees everything else as of that step.
    """
    yield "av_estimator_refits_total", "", present.refits
    for kind in ("drafted", "admitted", "accepted"):
        yield f"av_estimator_looked_up_{kind}_tokens_total", "", getattr(present.lookup, kind)
    yield "av_estimator_budget", "", present.budget
    yield "av_estimator_planned_depth", "", present.depth
    yield "av_estimator_slope", "", present.slope
    yield "av_estimator_history_coefficient", "", present.history
    yield from _calibration_values("av_estimator", "", present.calibration)
    for number, position in enumerate(present.positions, start=1):
        label = str(number)
        yield "av_estimator_drafted_tokens_total", label, position.drafted
        yield "av_estimator_admitted_tokens_total", label, position.admitted
        yield "av_estimator_accepted_tokens_total", label, position.accepted
        yield "av_estimator_position_intercept", label, position.intercept
        yield from _calibration_values("av_estimator_position", label, position.calibration)
    yield "av_estimator_steps_total", "", present.steps


def _calibration_values(
    prefix: str, label: str, calibration: CalibrationReport
) -> Iterator[tuple[str, str, float | None]]:
    for name in ("labels", "auc", "log_loss", "calibration_error"):
        yield f"{prefix}_{name}", label, getattr(calibration, name)

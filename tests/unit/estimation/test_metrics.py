"""The estimator's metrics say what the stage knows, off the step's thread, and say it to the end."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.estimation.chain import CURVES, KEY, MadeChain

from adaptive_verification.estimation.draft_counts import ACCEPTED, ADMITTED, DRAFTED
from adaptive_verification.estimation.metrics import METRICS, MeteredEstimator
from adaptive_verification.estimation.report import report
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings

SPECS = {spec.name: spec for spec in METRICS}


class DictBackend:
    """Values by (metric, label value). Each call tells the tests that wait."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = defaultdict(float)
        self.num_calls = 0
        self._changed = threading.Condition()

    def increment(self, name: str, label_value: str, amount: float) -> None:
        assert amount >= 0
        self._put(name, label_value, "counter", self.values[name, label_value] + amount)

    def set(self, name: str, label_value: str, value: float) -> None:
        self._put(name, label_value, "gauge", value)

    def _put(self, name: str, label_value: str, kind: str, value: float) -> None:
        assert SPECS[name].kind == kind
        assert bool(SPECS[name].label) == bool(label_value)
        with self._changed:
            self.values[name, label_value] = value
            self.num_calls += 1
            self._changed.notify_all()

    def wait_for(self, name: str, value: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.values[name, ""] == value, timeout=30), self.values


def _stage(**settings: Any) -> EstimatorStage:
    return EstimatorStage(EstimatorSettings.model_validate(settings), evidence_key=KEY, curves=CURVES)


@pytest.fixture
def backend() -> DictBackend:
    return DictBackend()


@pytest.fixture
def metered(backend: DictBackend) -> Iterator[MeteredEstimator]:
    metered = MeteredEstimator(_stage(refit_interval=10), backend, interval_s=0.0)
    yield metered
    metered.close()


def test_published_values_are_the_stages_own_after_the_last_step(
    metered: MeteredEstimator, backend: DictBackend
) -> None:
    stage = metered._stage
    chain = MadeChain(metered, rows=4, lookup_share=0.3)  # type: ignore[arg-type]
    for _ in range(35):
        chain.step()
    backend.wait_for("av_estimator_steps_total", 35)
    metered.close()
    values, quality = backend.values, stage.calibration.report()
    assert values["av_estimator_refits_total", ""] == 3
    assert values["av_estimator_slope", ""] == stage.fit.shared[0].item()
    assert values["av_estimator_history_coefficient", ""] == stage.fit.shared[1].item()
    assert values["av_estimator_budget", ""] == stage.last_budget
    assert values["av_estimator_planned_depth", ""] == stage.last_depth
    assert values["av_estimator_auc", ""] == quality.auc
    assert values["av_estimator_log_loss", ""] == quality.log_loss
    assert values["av_estimator_calibration_error", ""] == quality.calibration_error
    for position in range(7):
        label = str(position + 1)
        assert values["av_estimator_position_intercept", label] == stage.fit.intercepts[position].item()
        assert values.get(("av_estimator_position_log_loss", label)) == stage.calibration.report(position).log_loss
        for name, kind in (("drafted", DRAFTED), ("admitted", ADMITTED), ("accepted", ACCEPTED)):
            assert values[f"av_estimator_{name}_tokens_total", label] == stage.counts.by_position[kind, position]
            assert values[f"av_estimator_looked_up_{name}_tokens_total", ""] == stage.counts.looked_up[kind] > 0


def test_every_family_has_a_help_text_and_the_prefix_and_is_published(
    metered: MeteredEstimator, backend: DictBackend
) -> None:
    chain = MadeChain(metered, rows=8)  # type: ignore[arg-type]
    for _ in range(25):
        chain.step()
    backend.wait_for("av_estimator_steps_total", 25)
    metered.close()
    assert {name for name, _ in backend.values} == set(SPECS)
    assert all(name.startswith("av_estimator_") and spec.help for name, spec in SPECS.items())
    assert all(math.isfinite(value) for value in backend.values.values())


def test_what_is_not_known_is_not_published(backend: DictBackend) -> None:
    metered = MeteredEstimator(_stage(feature="q_max_unfitted"), backend, interval_s=0.0)
    MadeChain(metered, rows=1, most_drafts=2).step()  # type: ignore[arg-type]
    backend.wait_for("av_estimator_steps_total", 1)
    metered.close()
    published = {name for name, _ in backend.values}
    assert {label for name, label in backend.values if name == "av_estimator_drafted_tokens_total"} == {"1", "2"}
    assert "av_estimator_budget" in published
    assert not published & {"av_estimator_slope", "av_estimator_position_intercept", "av_estimator_auc"}


def test_a_kept_states_counts_are_published_before_the_first_step(backend: DictBackend) -> None:
    stage = _stage()
    stage.steps = 77
    metered = MeteredEstimator(stage, backend, interval_s=0.0)
    backend.wait_for("av_estimator_steps_total", 77)
    metered.close()


def test_between_two_publications_steps_send_nothing(backend: DictBackend) -> None:
    metered = MeteredEstimator(_stage(), backend, interval_s=1e6)
    backend.wait_for("av_estimator_planned_depth", 16)  # the first publication, before any step
    chain = MadeChain(metered, rows=4)  # type: ignore[arg-type]
    chain.step()
    calls = backend.num_calls
    for _ in range(20):
        chain.step()
    assert backend.num_calls == calls
    metered.close()


def test_a_step_that_publishes_nothing_costs_microseconds_more_than_the_stages_own(backend: DictBackend) -> None:
    class Instant:
        steps = 0

        def step(self, request: Any, draft: Any) -> None: ...

    metered = MeteredEstimator(_stage(), backend, interval_s=1e6)
    metered._stage = Instant()  # type: ignore[assignment]
    fastest = math.inf
    for _ in range(200):
        started = time.perf_counter()
        metered.step(None, None)  # type: ignore[arg-type]
        fastest = min(fastest, time.perf_counter() - started)
    assert fastest < 50e-6


def test_a_backend_that_fails_stops_the_metrics_and_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(DictBackend):
        def set(self, name: str, label_value: str, value: float) -> None:
            raise RuntimeError("the server has gone")

    metered = MeteredEstimator(_stage(), Broken(), interval_s=0.0)
    metered._thread.join(timeout=30)
    assert "none will be from here on" in caplog.text
    MadeChain(metered, rows=1).step()  # type: ignore[arg-type]
    assert report(metered._stage).steps == 1
    metered.close()

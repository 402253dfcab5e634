"""Metrics add up whatever is published when."""

from __future__ import annotations

from collections import defaultdict

import pytest

from adaptive_verification.contract import DraftCost, StepCost
from adaptive_verification.generation import statistics
from adaptive_verification.generation.statistics import METRICS, EngineMetrics, StepRecord


class DictBackend:
    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = defaultdict(float)
        self.num_calls = 0

    def increment(self, name: str, label_value: str, amount: float) -> None:
        self._check(name, label_value, "counter")
        self.values[name, label_value] += amount

    def set(self, name: str, label_value: str, value: float) -> None:
        self._check(name, label_value, "gauge")
        self.values[name, label_value] = value

    def _check(self, name: str, label_value: str, kind: str) -> None:
        self.num_calls += 1
        spec = next(spec for spec in METRICS if spec.name == name)
        assert spec.kind == kind
        assert label_value in spec.label_values


COST = StepCost(DraftCost.nothing(), 0.0, 0.0, 3, 4, reused_tokens=2)


def record(*, live_sequences: int, failed: bool = False) -> StepRecord:
    return StepRecord(10.0, 1.5, COST, 3, 4, 5, 6, 7, 2, live_sequences, 9 * bool(live_sequences), failed, 2, 30.5)


def test_sums_are_held_back_while_busy_and_complete_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PUBLISH_INTERVAL_SECONDS", 1e9)
    backend = DictBackend()
    metrics = EngineMetrics(backend)
    for _ in range(9):
        metrics.observe(record(live_sequences=3))
    assert backend.num_calls == 0
    metrics.observe(record(live_sequences=0, failed=True))
    values = backend.values
    assert values["av_steps_total", ""] == 10
    assert values["av_failed_steps_total", ""] == 1
    assert values["av_step_rows_total", ""] == 30
    assert values["av_step_milliseconds_total", "transport"] == pytest.approx(100)
    assert values["av_step_milliseconds_total", "loop"] == pytest.approx(15)
    assert values["av_prompt_tokens_total", ""] == 40
    assert values["av_reused_prompt_tokens_total", ""] == 20
    assert values["av_output_tokens_total", ""] == 50
    assert values["av_first_tokens_total", ""] == 20
    assert values["av_time_to_first_token_milliseconds_total", ""] == pytest.approx(305)
    states = ("drafted", "admitted", "accepted")
    assert [values["av_draft_tokens_total", state] for state in states] == [60, 70, 20]
    assert values["av_live_sequences", ""] == values["av_waiting_requests", ""] == 0

"""Triton's custom metrics, with a stand-in for the module that exists only in the server."""

from __future__ import annotations

from typing import Any

from adaptive_verification.serving.metrics import MetricSpec, TritonMetrics


class Metric:
    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    made: list[MetricFamily]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: dict[tuple[tuple[str, str], ...], Metric] = {}
        self.made.append(self)

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802
        key = tuple(labels.items())
        assert key not in self.metrics, "a metric is made once"
        return self.metrics.setdefault(key, Metric())


def _values() -> dict[str, dict[Any, float]]:
    return {family.name: {key: m.value for key, m in family.metrics.items()} for family in MetricFamily.made}


def test_metrics_with_known_labels_are_there_at_once_and_others_when_they_have_a_value() -> None:
    MetricFamily.made = []

    class PbUtils:
        MetricFamily = MetricFamily

    metrics = TritonMetrics(
        PbUtils,
        [
            MetricSpec("plain", "counter", "Text"),
            MetricSpec("parts", "counter", "Text", "part", ("a", "b")),
            MetricSpec("late", "gauge", "Text", label_values=()),
            MetricSpec("positions", "gauge", "Text", "position", ()),
        ],
    )
    assert _values() == {
        "plain": {(): 0},
        "parts": {(("part", "a"),): 0, (("part", "b"),): 0},
        "late": {},
        "positions": {},
    }
    metrics.increment("plain", "", 2)
    metrics.increment("plain", "", 3)
    metrics.increment("parts", "b", 1)
    metrics.set("late", "", 0.5)
    metrics.set("positions", "3", 7)
    metrics.set("positions", "3", 8)
    assert _values() == {
        "plain": {(): 5},
        "parts": {(("part", "a"),): 0, (("part", "b"),): 1},
        "late": {(): 0.5},
        "positions": {(("position", "3"),): 8},
    }
    assert [family.kind for family in MetricFamily.made] == ["counter", "counter", "gauge", "gauge"]

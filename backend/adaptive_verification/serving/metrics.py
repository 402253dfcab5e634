"""Metrics of our own at the server's `/metrics`: what a family of metrics is, and the way to Triton's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

PUBLISH_INTERVAL_SECONDS = 0.5
"""Each metric is a round trip to the server's process: often enough for any scraper, too rare to matter."""


class MetricSpec(NamedTuple):
    """A family of metrics: one for each value of its label, or a single one without a label."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: str = ""
    label_values: tuple[str, ...] = ("",)
    """Those that are there from the start. Others appear when they first have a value."""


class MetricsBackend(Protocol):
    """Where metrics go. A metric without a label has the label value ""."""

    def increment(self, name: str, label_value: str, amount: float) -> None: ...

    def set(self, name: str, label_value: str, value: float) -> None: ...


class TritonMetrics:
    """A `MetricsBackend`: Triton's own custom metrics.

    Args:
        pb_utils: the module `triton_python_backend_utils`, which exists only inside the server.
        specs: all families.
    """

    def __init__(self, pb_utils: Any, specs: Sequence[MetricSpec]) -> None:
        kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
        self._labels = {spec.name: spec.label for spec in specs}
        self._families = {  # a family's metrics die with it
            spec.name: pb_utils.MetricFamily(name=spec.name, description=spec.help, kind=kinds[spec.kind])
            for spec in specs
        }
        self._metrics: dict[tuple[str, str], Any] = {}
        for spec in specs:
            for value in spec.label_values:
                self._metric(spec.name, value)

    def increment(self, name: str, label_value: str, amount: float) -> None:
        self._metric(name, label_value).increment(amount)

    def set(self, name: str, label_value: str, value: float) -> None:
        self._metric(name, label_value).set(value)

    def _metric(self, name: str, label_value: str) -> Any:
        metric = self._metrics.get((name, label_value))
        if metric is None:
            labels = {self._labels[name]: label_value} if self._labels[name] else {}
            metric = self._metrics[name, label_value] = self._families[name].Metric(labels=labels)
        return metric

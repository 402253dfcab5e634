"""The engine's metrics as Triton's own: they appear at the server's `/metrics`."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from adaptive_verification.generation.statistics import METRICS


class TritonMetrics:
    """A `statistics.MetricsBackend`."""

    def __init__(self) -> None:
        kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
        self._families = []  # a family's metrics die with it
        self._metrics: dict[tuple[str, str], Any] = {}
        for spec in METRICS:
            family = pb_utils.MetricFamily(name=spec.name, description=spec.help, kind=kinds[spec.kind])
            self._families.append(family)
            for value in spec.label_values:
                labels = {spec.label: value} if spec.label else {}
                self._metrics[spec.name, value] = family.Metric(labels=labels)

    def increment(self, name: str, label_value: str, amount: float) -> None:
        self._metrics[name, label_value].increment(amount)

    def set(self, name: str, label_value: str, value: float) -> None:
        self._metrics[name, label_value].set(value)

"""The fit of DESIGN's section 4 once more, slowly: float64, plain loops, and the full (K + m) x (K + m) system."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

RIDGE = 1e-3
DAMPING = 50.0


@dataclass
class ReferenceFit:
    num_positions: int
    num_shared: int = 1
    refit_interval: int = 100
    steps: int = 0
    labels: list[tuple[NDArray[Any], int, float]] = field(default_factory=list)  # features, position, accepted

    def __post_init__(self) -> None:
        self.shared = np.zeros(self.num_shared)
        self.shared[0] = 0.5
        self.intercepts = np.full(self.num_positions, -0.2)

    def fold(self, features: NDArray[Any], admitted: NDArray[Any], accepted: NDArray[Any]) -> None:
        """Features `[rows, K, m]`, counts `[rows]`."""
        for row in range(len(admitted)):
            for position in range(admitted[row]):
                if position <= accepted[row]:
                    self.labels.append((features[row, position], position, float(position < accepted[row])))
        self.steps += 1
        if self.steps % self.refit_interval == 0:
            self._refit()

    def _refit(self) -> None:
        m, size = self.num_shared, self.num_shared + self.num_positions
        system, gradient, counts = np.eye(size) * RIDGE, np.zeros(size), np.zeros(self.num_positions)
        for features, position, accepted in self.labels:
            design = np.zeros(size)
            design[:m] = features
            design[m + position] = 1.0
            p = 1 / (1 + np.exp(-(features @ self.shared + self.intercepts[position])))
            system += p * (1 - p) * np.outer(design, design)
            gradient += (accepted - p) * design
            counts[position] += 1
        step = np.linalg.solve(system, gradient)[:m] * counts.sum() / (counts.sum() + DAMPING)
        # Given the damped shared step, each intercept's own equation, damped by its own labels.
        own = (gradient[m:] - system[m:, :m] @ step) / np.diag(system)[m:]
        self.intercepts = self.intercepts + own * counts / (counts + DAMPING)
        self.shared = np.maximum(self.shared + step, 0.0)
        self.labels.clear()

"""Made streams of drafts with known coefficients, from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_verification.estimation.online_fit import OnlineFit


@dataclass(frozen=True)
class StreamStep:
    features: NDArray[Any]  # [rows, K, m]
    admitted: NDArray[Any]  # [rows]
    accepted: NDArray[Any]  # [rows]


def make_stream(
    seed: int,
    *,
    steps: int,
    shared: tuple[float, ...] = (0.8,),
    intercepts: tuple[float, ...] = (0.4, 0.0, -0.3, 0.2, -0.6),
    rows: int = 16,
    full: bool = False,
) -> Iterator[StreamStep]:
    """Drafts whose acceptance follows the coefficients; admitted at random, or all where `full`."""
    random, num_positions = np.random.default_rng(seed), len(intercepts)
    for _ in range(steps):
        features = random.normal(0.5, 1.5, size=(rows, num_positions, len(shared)))
        p = 1 / (1 + np.exp(-(features @ np.asarray(shared) + np.asarray(intercepts))))
        admitted = np.full(rows, num_positions) if full else random.integers(0, num_positions + 1, rows)
        would_accept = (random.random(p.shape) < p).cumprod(1).sum(1)
        yield StreamStep(features, admitted, np.minimum(would_accept, admitted))


def fold(fit: OnlineFit, step: StreamStep) -> bool:
    """Labels the step's drafts as the target would and hands them to the fit."""
    position = torch.arange(step.features.shape[1])
    accepted_count = torch.from_numpy(step.accepted).unsqueeze(1)
    labelled = (position <= accepted_count) & (position < torch.from_numpy(step.admitted).unsqueeze(1))
    return fit.fold(torch.from_numpy(step.features).to(fit.shared.dtype), position < accepted_count, labelled)

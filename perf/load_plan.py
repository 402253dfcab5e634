"""What the load study measures, and in which order: arms, samplings, points.

Knows names and settings; nothing of servers and results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perf.load_requests import ramp_up_tokens

_BETWEEN_RUNS_S = 4.0
"""An estimator is loaded, perf_analyzer starts and stops."""
MAX_DRAFT_TOKENS = 7
"""Drafts of a step, at most (K), of the server and so of every arm."""


@dataclass(frozen=True)
class Arm:
    """A way to serve the same requests."""

    name: str
    estimator_settings: Mapping[str, str] = field(default_factory=dict)
    num_draft_tokens: int = MAX_DRAFT_TOKENS
    """Of each request."""
    learns: bool = False
    """Whether what it does depends on what the estimator has learned, so that it must learn before it is measured."""
    cold: bool = False
    """Whether its window is instead the first `COLD_TOKENS` tokens of an estimator that has learned nothing, from an
    idle server on. Such arms are compared with each other only, and measured once in a repeat."""

    @property
    def is_fixed(self) -> bool:
        """Whether every step drafts and verifies the same number of tokens for each sequence, in steady state."""
        return self.estimator_settings.get("trim") == "off" and not self.cold


COLD_TOKENS = 2000
"""Output tokens of all requests together within which what an estimator has yet to learn must not cost much."""
ADAPTIVE, ADAPTIVE_COLD = "av", "av-cold"
NO_SPECULATION, NO_SPECULATION_COLD = "k0", "k0-cold"
ARMS = {
    arm.name: arm
    for arm in (
        *(Arm(f"k{k}", {"trim": "off"}, num_draft_tokens=k) for k in range(MAX_DRAFT_TOKENS + 1)),
        Arm(ADAPTIVE, learns=True),
        Arm(NO_SPECULATION_COLD, {"trim": "off"}, num_draft_tokens=0, cold=True),
        Arm(ADAPTIVE_COLD, cold=True),
        Arm("unfitted", {"feature": "q_max_unfitted"}, learns=True),
        Arm("threshold", {"trim": "threshold"}),
    )
}
"""By name. k0: no speculation; k1 to k7: so many drafts, all verified; av: adaptive verification with the online
estimator; k0-cold, av-cold: the first tokens of both from a fresh start; unfitted: adaptive verification with the
drafter's own q_max for the acceptance probability (EAGLE-2's rule); threshold: drafts are verified until q_max falls
below the setting `threshold`."""

SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
}
"""Inputs of each request, by name."""


class Point(NamedTuple):
    """One window to be measured."""

    sampling: str
    concurrency: int
    arm: str
    repeat: int
    """From 0."""
    window: int
    """Of the repeat, from 0."""


def plan(
    samplings: Sequence[str], concurrencies: Sequence[int], arms: Sequence[str], repeats: int, windows: int
) -> list[Point]:
    """All points, in the order of measurement.

    What is compared is measured side by side: one load at a time, and in it round by round a window of each arm. Every
    other round goes backwards, so that what becomes slower or faster all the while favours no arm.
    """
    return [
        Point(sampling, concurrency, arm, repeat, window)
        for repeat in range(repeats)
        for sampling in samplings
        for concurrency in concurrencies
        for window in range(windows)
        for arm in (arms if (repeat + window) % 2 == 0 else reversed(arms))
        if window == 0 or not ARMS[arm].cold
    ]


def expected_seconds(point: Point, *, window_s: float, max_tokens: int) -> float:
    """Roughly what a point takes on two cores, from the end of the one before: a first guess of a study's length."""
    tokens_per_second = 20 * point.concurrency / (1 + point.concurrency / 8)
    if ARMS[point.arm].cold:
        return _BETWEEN_RUNS_S + COLD_TOKENS / tokens_per_second
    return _BETWEEN_RUNS_S + window_s + ramp_up_tokens(point.concurrency, max_tokens) / tokens_per_second

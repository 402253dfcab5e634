"""What the load study measures, and in which order: arms, samplings, points.

Knows names and settings; nothing of servers and results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """Whether each point starts from nothing learned instead."""

    @property
    def is_fixed(self) -> bool:
        """Whether every step drafts and verifies the same number of tokens for each sequence."""
        return self.estimator_settings.get("trim") == "off"


ADAPTIVE, ADAPTIVE_COLD = "av", "av-cold"
NO_SPECULATION = "k0"
ARMS = {
    arm.name: arm
    for arm in (
        *(Arm(f"k{k}", {"trim": "off"}, num_draft_tokens=k) for k in range(MAX_DRAFT_TOKENS + 1)),
        Arm(ADAPTIVE, learns=True),
        Arm(ADAPTIVE_COLD, cold=True),
        Arm("unfitted", {"feature": "q_max_unfitted"}, learns=True),
        Arm("threshold", {"trim": "threshold"}),
    )
}
"""By name. k0: no speculation; k1 to k7: so many drafts, all verified; av: adaptive verification with the online
estimator; unfitted: the same with the drafter's own q_max for the acceptance probability (EAGLE-2's rule); threshold:
drafts are verified until q_max falls below the setting `threshold`."""

SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
}
"""Inputs of each request, by name."""


class Point(NamedTuple):
    """One measurement to be made."""

    sampling: str
    concurrency: int
    arm: str
    repeat: int
    """From 0."""


def plan(samplings: Sequence[str], concurrencies: Sequence[int], arms: Sequence[str], repeats: int) -> list[Point]:
    """All points, in the order of measurement.

    What is compared is measured side by side: within a repeat the arms of one concurrency follow each other, so that a
    slow spell of the machine falls on all of them. Each repeat begins with another arm, so that none is always first.
    """
    points = []
    for repeat in range(repeats):
        first = repeat * len(arms) // repeats
        rotated = [*arms[first:], *arms[:first]]
        points += [
            Point(sampling, concurrency, arm, repeat)
            for sampling in samplings
            for concurrency in concurrencies
            for arm in rotated
        ]
    return points

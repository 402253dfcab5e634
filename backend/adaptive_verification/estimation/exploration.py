"""Which rows draft deeper than the plan, so that what such drafts are worth stays known: a share of the time pays.

Positions that the plan does not draft, or always trims, would otherwise never be labelled again. The share is put on an
account, and what explores is taken off it. Where hardly anybody drafts, a row's model lacks what was confirmed since it
last drafted, and must compute that first; so the nearest row explores, some steps in a row, and pays for it once.

A function of the steps and costs before: nothing random, nothing of any token. Knows milliseconds, nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled

BURST_STEPS = 8
"""Exploration goes on for so many steps once it has begun."""
ROWS_PER_EXPLORING_ROW = 8
"""At most one row in so many (but one in any case) explores in a step."""
MOST_STEPS_BETWEEN = 512
"""However dear exploring is, some row does it once in so many steps."""
NEAR_TOKENS = 16
"""Rows that lack no more than so many tokens all explore in turn; where none is so near, the nearest does."""
UNKNOWN_BACKLOG = -1


class ExplorationCost:
    """Milliseconds, of this step and those like it.

    Args:
        planned_ms: the step's time without exploration.
        row_ms: what it costs that one row explores, by the tokens that its model lacks.
    """

    def __init__(self, planned_ms: float, row_ms: Callable[[int], float]) -> None:
        self.planned_ms = planned_ms
        self.row_ms = row_ms
        self.further_ms = row_ms(0)
        """Of a row that lacks nothing."""


class Exploration:
    """The account."""

    def __init__(self) -> None:
        self._saved_ms = 0.0
        self._steps_without = 0
        self._is_under_way = False

    def rows(self, step: int, backlog: NDArray[np.int64], share: float, cost: ExplorationCost) -> list[int]:
        """Rows that explore in a step.

        Args:
            step: counts the steps.
            backlog: `[rows]`, confirmed tokens that each row's model has not computed; UNKNOWN_BACKLOG: of a row that
                cannot explore.
            share: of the time that goes into exploration; 0: none.
            cost: of this step and of exploring.
        """
        if share <= 0:
            return []
        self._saved_ms += share * cost.planned_ms
        self._steps_without += 1
        if self._saved_ms < cost.further_ms and self._steps_without < MOST_STEPS_BETWEEN:
            self._is_under_way = False
            return []
        near, lacking_tokens = _nearest(backlog)
        if len(near) == 0:
            return []
        first_ms = cost.row_ms(lacking_tokens)
        burst_ms = first_ms + (BURST_STEPS - 1) * cost.further_ms
        most_rows = max(1, len(near) // ROWS_PER_EXPLORING_ROW)
        self._saved_ms = min(self._saved_ms, max(burst_ms, most_rows * first_ms))
        needed_ms = first_ms if self._is_under_way else burst_ms
        self._is_under_way = self._saved_ms >= needed_ms or self._steps_without >= MOST_STEPS_BETWEEN
        if not self._is_under_way:
            return []
        count = min(most_rows, max(1, int(self._saved_ms / max(first_ms, 1e-9))))
        self._saved_ms = max(0.0, self._saved_ms - count * first_ms)
        self._steps_without = 0
        return [int(near[(step * count + i) % len(near)]) for i in range(count)]


@compiled
def _nearest(backlog: NDArray[np.int64]) -> tuple[NDArray[np.intp], int]:
    """Rows whose model lacks the fewest tokens, and how many that is at most."""
    nearest = -1
    for tokens in backlog:
        if tokens >= 0 and (nearest < 0 or tokens < nearest):
            nearest = tokens
    (near,) = ((backlog >= 0) & (backlog <= max(NEAR_TOKENS, nearest))).nonzero()
    lacking_tokens = 0
    for row in near:
        lacking_tokens = max(lacking_tokens, backlog[row])
    return near, lacking_tokens

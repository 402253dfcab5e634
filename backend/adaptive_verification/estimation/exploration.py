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

BURST_STEPS = 8
"""Exploration goes on for so many steps once it has begun."""
ROWS_PER_EXPLORING_ROW = 8
"""At most one row in so many (but one in any case) explores in a step."""
MOST_STEPS_BETWEEN = 512
"""However dear exploring is, some row does it once in so many steps."""
NEAR_TOKENS = 16
"""Rows that lack no more than so many tokens all explore in turn; where none is so near, the nearest does."""
UNKNOWN_BACKLOG = -1


class Exploration:
    """The account."""

    def __init__(self) -> None:
        self._saved_ms = 0.0
        self._steps_without = 0
        self._is_under_way = False

    def rows(
        self, step: int, backlog: NDArray[np.int64], planned_ms: float, share: float, row_ms: Callable[[int], float]
    ) -> list[int]:
        """Rows that explore in a step.

        Args:
            step: counts the steps.
            backlog: `[rows]`, confirmed tokens that each row's model has not computed; UNKNOWN_BACKLOG: of a row that
                cannot explore.
            planned_ms: the step's time without exploration.
            share: of the time that goes into exploration; 0: none.
            row_ms: what it costs that one row explores, by the tokens that its model lacks.
        """
        if share <= 0:
            return []
        self._saved_ms += share * planned_ms
        self._steps_without += 1
        further_ms = row_ms(0)
        if self._saved_ms < further_ms and self._steps_without < MOST_STEPS_BETWEEN:
            self._is_under_way = False
            return []
        near, lacking_tokens = _nearest(backlog)
        if len(near) == 0:
            return []
        first_ms = row_ms(lacking_tokens)
        burst_ms = first_ms + (BURST_STEPS - 1) * further_ms
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


def _nearest(backlog: NDArray[np.int64]) -> tuple[NDArray[np.intp], int]:
    """Rows whose model lacks the fewest tokens, and how many that is at most."""
    known = backlog >= 0
    if not known.any():
        return np.empty(0, dtype=np.intp), 0
    (near,) = (known & (backlog <= max(NEAR_TOKENS, backlog[known].min()))).nonzero()
    return near, int(backlog[near].max())

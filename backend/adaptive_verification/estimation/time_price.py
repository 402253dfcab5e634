"""What a millisecond is worth, in tokens: a draft is made and verified if it brings more than its time does elsewhere.

Maximizing each step's own tokens per millisecond does not maximize those of many steps. A step of which little comes
would admit drafts that are worth less than their time, as its rate is low with or without them; one with a long match
would leave out drafts that are worth more. What maximizes the ratio of the sums is to charge all steps the same price,
the ratio itself (Dinkelbach, "On nonlinear fractional programming", Management Science 13, 1967): each takes what
brings the most tokens beyond `price x milliseconds`.

The ratio depends on the number of rows, so what is remembered is how much faster than no speculation recent steps were,
in tokens and times as they were expected; and for every doubling of the rows by itself, because one row gains half as
much again where eight gain nothing: with one memory for all, a burst would be decided at the price of the quiet before
it. The price is that of an earlier step, so it cannot bias the present one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

_KEEP_PER_STEP = 0.98
"""The memory: the last 50 steps or so, of as many rows."""


class TimePrice:
    """Before anything was seen, speculation is taken to be no faster than none, and time is cheap."""

    def __init__(self) -> None:
        self._recent_steps: defaultdict[int, _Sums] = defaultdict(_Sums)

    def speed_up(self, rows: int) -> float:
        """Tokens per millisecond of recent steps over those without speculation."""
        recent = self._recent_steps[_doublings(rows)]
        return recent.tokens / recent.time

    def per_ms(self, rows: int, plain_ms: float) -> float:
        """Tokens that a millisecond must bring.

        Args:
            rows: that sample, in the step.
            plain_ms: what the step takes without speculation.
        """
        return self.speed_up(rows) * rows / plain_ms

    def add(self, rows: int, plain_ms: float, tokens: float, milliseconds: float) -> None:
        """Counts one step: so many tokens in so many milliseconds, as expected of it."""
        if rows > 0:
            recent = self._recent_steps[_doublings(rows)]
            recent.tokens = recent.tokens * _KEEP_PER_STEP + tokens / rows
            recent.time = recent.time * _KEEP_PER_STEP + milliseconds / plain_ms


@dataclass
class _Sums:
    """In units of a step without speculation; one such step to start with."""

    tokens: float = 1.0
    time: float = 1.0


def _doublings(rows: int) -> int:
    """0 for 1 row, 1 for 2, 2 for 3 and 4, 3 for 5 to 8, ..."""
    return max(0, rows - 1).bit_length()

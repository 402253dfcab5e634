"""What a millisecond is worth, in tokens: a draft is made and verified if it brings more than its time does elsewhere.

Maximizing each step's own tokens per millisecond does not maximize those of many steps. A step of which little comes
would admit drafts that are worth less than their time, as its rate is low with or without them; one with a long match
would leave out drafts that are worth more. What maximizes the ratio of the sums is to charge all steps the same price,
the ratio itself (Dinkelbach, "On nonlinear fractional programming", Management Science 13, 1967): each takes what
brings the most tokens beyond `price x milliseconds`.

The ratio depends on the number of rows, so what is remembered is how much faster than no speculation recent steps were,
in tokens and times as they were expected. The price is that of an earlier step, so it cannot bias the present one.
"""

from __future__ import annotations

_KEEP_PER_STEP = 0.98
"""The memory: the last 50 steps or so."""


class TimePrice:
    """Before anything was seen, speculation is taken to be no faster than none, and time is cheap."""

    def __init__(self) -> None:
        # in units of a step without speculation; one such step to start with
        self._tokens = 1.0
        self._time = 1.0

    @property
    def speed_up(self) -> float:
        """Tokens per millisecond of recent steps over those without speculation."""
        return self._tokens / self._time

    def per_ms(self, rows: int, plain_ms: float) -> float:
        """Tokens that a millisecond must bring.

        Args:
            rows: that sample, in the step.
            plain_ms: what the step takes without speculation.
        """
        return self.speed_up * rows / plain_ms

    def add(self, rows: int, plain_ms: float, tokens: float, milliseconds: float) -> None:
        """Counts one step: so many tokens in so many milliseconds, as expected of it."""
        if rows > 0:
            self._tokens = self._tokens * _KEEP_PER_STEP + tokens / rows
            self._time = self._time * _KEEP_PER_STEP + milliseconds / plain_ms

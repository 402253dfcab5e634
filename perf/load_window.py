"""Which of a run's tokens are measured: those after the streams have filled up and before any of them ends.

Pure functions of the server's counters as they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from perf.server_counters import Reading, spent

OUTPUT_TOKENS = "av_output_tokens_total"


class Counted(NamedTuple):
    """What the server did in a window."""

    seconds: float
    counts: Mapping[str, float]
    """By counter."""

    @property
    def tokens_per_second(self) -> float:
        return self.counts[OUTPUT_TOKENS] / self.seconds


class Window(NamedTuple):
    """A part of a run, in output tokens of all its streams together: the same work for every arm."""

    skipped_tokens: int
    """Before it opens."""
    tokens: int
    """From there on, at least: it ends when the server next publishes its counters."""

    def measure(self, before: Mapping[str, float], readings: Iterable[Reading]) -> Counted:
        """What was counted in the window.

        Args:
            before: the counters before the run.
            readings: of the run, in order; taken as far as the window's end.

        Raises:
            RuntimeError: they end before the window does.
        """
        opened: Reading | None = None
        for reading in readings:
            if opened is None:
                if reading.counters[OUTPUT_TOKENS] - before[OUTPUT_TOKENS] >= self.skipped_tokens:
                    opened = reading
                continue
            counts = spent(opened.counters, reading.counters)
            if counts[OUTPUT_TOKENS] >= self.tokens:
                return Counted(reading.at_s - opened.at_s, counts)
        raise RuntimeError(f"the run ended before {self.skipped_tokens} and {self.tokens} tokens")

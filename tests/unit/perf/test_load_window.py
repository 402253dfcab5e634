"""Which readings a window begins and ends with, and what was counted in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from perf.load_window import OUTPUT_TOKENS, Window
from perf.server_counters import Reading

BEFORE = {OUTPUT_TOKENS: 1000.0, "av_steps_total": 100.0}


def readings(*tokens: float) -> Iterator[Reading]:
    """One a second, each after so many tokens of the run and as many steps."""
    for second, count in enumerate(tokens):
        yield Reading(10.0 + second, {OUTPUT_TOKENS: 1000.0 + count, "av_steps_total": 100.0 + count})


def test_a_window_opens_after_the_ramp_up_and_closes_after_its_tokens() -> None:
    counted = Window(50, 100).measure(BEFORE, readings(5, 49, 60, 100, 159, 160, 300))
    assert counted.counts == {OUTPUT_TOKENS: 100.0, "av_steps_total": 100.0}
    assert counted.seconds == 3.0
    assert counted.tokens_per_second == pytest.approx(100 / 3)


def test_tokens_beyond_the_window_are_counted_with_the_time_they_took() -> None:
    counted = Window(0, 100).measure(BEFORE, readings(20, 119, 200))
    assert (counted.counts[OUTPUT_TOKENS], counted.seconds) == (180.0, 2.0)


def test_a_window_without_ramp_up_opens_at_the_first_step() -> None:
    assert Window(0, 10).measure(BEFORE, readings(0, 10)).counts[OUTPUT_TOKENS] == 10


def test_no_more_is_read_than_the_window_needs() -> None:
    run = readings(60, 160, 170)
    Window(50, 100).measure(BEFORE, run)
    assert next(run).counters[OUTPUT_TOKENS] == 1170


def test_a_run_that_ends_before_its_window_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="ended before"):
        Window(50, 100).measure(BEFORE, readings(60, 150))

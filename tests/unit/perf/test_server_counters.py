"""When the server's counters are read: once for each time that it published them, and whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import pytest
from perf import server_counters
from perf.server_counters import publications, spent


def reader(*moments: tuple[float, float]) -> Callable[[], Mapping[str, float]]:
    """(steps, output tokens) of each moment at which it is read."""
    left = iter(moments)

    def read() -> Mapping[str, float]:
        steps, tokens = next(left)
        return {"av_steps_total": steps, "av_output_tokens_total": tokens}

    return read


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_counters, "_POLL_INTERVAL_S", 0.0)


def test_every_publication_is_read_once_and_after_all_its_counters_are_out() -> None:
    read = reader((5, 50), (5, 50), (9, 50), (9, 90), (9, 90), (12, 120), (12, 120))
    found = [reading.counters for reading in islice(publications(read, {"av_steps_total": 5.0}), 2)]
    assert found == [
        {"av_steps_total": 9, "av_output_tokens_total": 90},
        {"av_steps_total": 12, "av_output_tokens_total": 120},
    ]


def test_a_publication_has_the_time_at_which_it_was_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr("perf.server_counters.time.monotonic", lambda: next(times))
    read = reader((5, 50), (9, 50), (9, 90), (9, 90), (12, 120), (12, 120))
    found = [reading.at_s for reading in islice(publications(read, {"av_steps_total": 5.0}), 2)]
    assert found == [2.0, 4.0]


def test_a_counter_that_was_not_there_before_began_at_nothing() -> None:
    assert spent({"a": 2.0}, {"a": 5.0, "b": 1.0}) == {"a": 3.0, "b": 1.0}

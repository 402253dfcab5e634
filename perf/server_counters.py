"""What a running server counts: its own metrics, before, during and after a load."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from adaptive_verification.serving.launcher import RunningServer

_POLL_INTERVAL_S = 0.05


class Reading(NamedTuple):
    """Counters as the server published them."""

    at_s: float
    """Seconds of some clock."""
    counters: Mapping[str, float]


def read_counters(server: RunningServer) -> dict[str, float]:
    """Metric with its labels -> value, of this project's metrics."""
    with urllib.request.urlopen(server.metrics_url) as response:
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line.startswith("av_"))}


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted in between; a counter that was not there before began at 0."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def read_idle_counters(server: RunningServer, timeout_s: float = 60.0) -> dict[str, float]:
    """Like `read_counters`, as soon as no request is left: nothing of an earlier load is counted later.

    Raises:
        TimeoutError: there still are requests after so long.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        counters = read_counters(server)
        if not counters.get("av_live_sequences") and not counters.get("av_waiting_requests"):
            return counters
        time.sleep(_POLL_INTERVAL_S)
    raise TimeoutError(f"the server still has requests after {timeout_s:.0f} s")


def publications(read: Callable[[], Mapping[str, float]], before: Mapping[str, float]) -> Iterator[Reading]:
    """A reading each time that the server has published its step counters; endless.

    It does so twice a second at most, at the end of a step. So counts per second are right only between two such
    moments: between any others up to half a second of steps would be missing, or too many.

    Args:
        read: gives the counters of this moment.
        before: those that are known already.
    """
    steps = before["av_steps_total"]
    while True:
        time.sleep(_POLL_INTERVAL_S)
        at_s, counters = time.monotonic(), read()
        if counters["av_steps_total"] != steps:
            time.sleep(_POLL_INTERVAL_S)  # one counter is published after the other
            counters = read()
            steps = counters["av_steps_total"]
            yield Reading(at_s, counters)

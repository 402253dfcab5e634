"""What a running server counts: its own metrics, before and after a load."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping

from adaptive_verification.serving.launcher import RunningServer

_POLL_INTERVAL_S = 0.1


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

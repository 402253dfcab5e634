"""Made measurements of the load study."""

from __future__ import annotations

from typing import Any

from perf.load_results import Measurement


def measurement(arm: str, tokens_per_second: float = 10.0, **values: Any) -> Measurement:
    """One window of one arm; everything else has some value unless it is given."""
    defaults: dict[str, Any] = {
        "sampling": "greedy",
        "concurrency": 1,
        "repeat": 0,
        "window": 0,
        "seconds": 64 / tokens_per_second,
        "tokens": 64,
        "steps": 50,
        "prompt_tokens": 100,
        "first_tokens": 4,
        "first_tokens_ms": 600.0,
        "drafted_tokens": 40,
        "admitted_tokens": 30,
        "accepted_tokens": 24,
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    return Measurement(arm=arm, **{**defaults, **values})

"""What each step cost and where the time went: kept for the last steps, and summed up as metrics.

Knows names and numbers; where metrics go is behind `MetricsBackend`. `StepStatistics` belongs to the engine's loop,
`EngineMetrics` to the responder's thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import NamedTuple

from adaptive_verification.contract.costs import StepCost
from adaptive_verification.serving.metrics import PUBLISH_INTERVAL_SECONDS, MetricsBackend, MetricSpec

KEPT_STEPS = 4096


class StepRecord(NamedTuple):
    """One iteration of the loop. Times in milliseconds."""

    step_ms: float
    """The step's call, as the loop saw it."""
    loop_ms: float
    """The loop's own work before and after the call."""
    cost: StepCost | None
    """What the stages measured; None where they measured nothing, or the step failed."""
    rows: int
    prompt_tokens: int
    output_tokens: int
    drafted_tokens: int
    admitted_tokens: int
    accepted_tokens: int
    live_sequences: int
    waiting_requests: int
    failed: bool
    first_tokens: int
    """Requests that got their first token."""
    first_tokens_ms: float
    """How long they waited for it since they were sent, summed up."""

    @property
    def parts_ms(self) -> dict[str, float]:
        """The iteration's time by part: `transport` is what the stages did not see of the step's call."""
        if self.cost is None:
            stages = {"drafter": 0.0, "estimator": 0.0, "verifier": 0.0}
        else:
            draft = self.cost.draft
            stages = {
                "drafter": draft.prefill_ms + draft.extend_ms,
                "estimator": self.cost.estimate_ms,
                "verifier": self.cost.verify_ms,
            }
        return stages | {"transport": self.step_ms - sum(stages.values()), "loop": self.loop_ms}


class StepStatistics:
    """The records of the last steps, in order."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def records(self) -> list[StepRecord]:
        """A copy; may be called from any thread."""
        return list(self._records)


METRICS = (
    MetricSpec("av_live_sequences", "gauge", "Sequences being decoded"),
    MetricSpec("av_waiting_requests", "gauge", "Requests waiting in the queue of generate"),
    MetricSpec("av_steps_total", "counter", "Decode steps"),
    MetricSpec("av_failed_steps_total", "counter", "Decode steps that failed as a whole"),
    MetricSpec("av_step_rows_total", "counter", "Sequences over all decode steps; by av_steps_total: the mean batch"),
    MetricSpec(
        "av_step_milliseconds_total",
        "counter",
        "Time of all decode steps by part; transport: between the stages, loop: the text front's own work",
        "part",
        ("drafter", "estimator", "verifier", "transport", "loop"),
    ),
    MetricSpec("av_prompt_tokens_total", "counter", "Prompt tokens taken in, refills of lost caches included"),
    MetricSpec(
        "av_reused_prompt_tokens_total", "counter", "Of these, tokens that another sequence's cache already had"
    ),
    MetricSpec("av_output_tokens_total", "counter", "Tokens decoded"),
    MetricSpec("av_first_tokens_total", "counter", "Requests that got their first token"),
    MetricSpec(
        "av_time_to_first_token_milliseconds_total",
        "counter",
        "From these requests' arrival to their first token; by av_first_tokens_total: the mean",
    ),
    MetricSpec(
        "av_draft_tokens_total",
        "counter",
        "Draft tokens: drafted, admitted to verification, accepted by the target",
        "state",
        ("drafted", "admitted", "accepted"),
    ),
)


class EngineMetrics:
    """Sums records up and passes the sums on, at most every `PUBLISH_INTERVAL_SECONDS` while the engine is busy."""

    def __init__(self, backend: MetricsBackend) -> None:
        self._backend = backend
        self._unpublished: Counter[tuple[str, str]] = Counter()
        self._published_at = 0.0

    def observe(self, record: StepRecord) -> None:
        """Adds a step; publishes if it is time, or if nothing is left to do."""
        sums: Counter[tuple[str, str]] = self._unpublished
        sums["av_steps_total", ""] += 1
        sums["av_failed_steps_total", ""] += record.failed
        sums["av_step_rows_total", ""] += record.rows
        for part, milliseconds in record.parts_ms.items():
            sums["av_step_milliseconds_total", part] += milliseconds  # type: ignore[assignment]
        sums["av_prompt_tokens_total", ""] += record.prompt_tokens
        if record.cost is not None:
            sums["av_reused_prompt_tokens_total", ""] += round(record.cost.reused_tokens)
        sums["av_output_tokens_total", ""] += record.output_tokens
        sums["av_first_tokens_total", ""] += record.first_tokens
        sums["av_time_to_first_token_milliseconds_total", ""] += record.first_tokens_ms  # type: ignore[assignment]
        sums["av_draft_tokens_total", "drafted"] += record.drafted_tokens
        sums["av_draft_tokens_total", "admitted"] += record.admitted_tokens
        sums["av_draft_tokens_total", "accepted"] += record.accepted_tokens
        idle = not record.live_sequences and not record.waiting_requests
        if idle or time.monotonic() - self._published_at >= PUBLISH_INTERVAL_SECONDS:
            self._publish(record)

    def _publish(self, record: StepRecord) -> None:
        self._published_at = time.monotonic()
        self._backend.set("av_live_sequences", "", record.live_sequences)
        self._backend.set("av_waiting_requests", "", record.waiting_requests)
        for (name, label_value), amount in self._unpublished.items():
            if amount > 0:
                self._backend.increment(name, label_value, amount)
        self._unpublished.clear()

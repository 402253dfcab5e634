"""The loop of continuous batching: one thread, one packed step of all live sequences per iteration.

Sequences join and leave between steps. Knows threads and failures; what a step holds is the scheduler's, text and
clients are the responder's, and how a step is computed is the `Step`'s (Triton's ensemble, or stages in this process).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from adaptive_verification.contract.costs import StepCost
from adaptive_verification.contract.messages import StepResult
from adaptive_verification.contract.step import Step
from adaptive_verification.errors import AdaptiveVerificationError, ServerBusy, StepFailed
from adaptive_verification.generation.detokenizer import Detokenizer
from adaptive_verification.generation.request import GenerationRequest
from adaptive_verification.generation.responder import Responder, StepOutcome
from adaptive_verification.generation.response import Sink
from adaptive_verification.generation.scheduler import ScheduledStep, Scheduler
from adaptive_verification.generation.statistics import EngineMetrics, StepRecord, StepStatistics
from adaptive_verification.generation.text_stream import TextStream
from adaptive_verification.serving.metrics import MetricsBackend
from adaptive_verification.settings import GenerateSettings

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests until it is closed. All methods may be called from any thread.

    One lock guards the scheduler; it is never held while a step runs or a client is talked to.
    """

    def __init__(
        self,
        step: Step,
        settings: GenerateSettings,
        *,
        new_detokenizer: Callable[[], Detokenizer],
        end_token_ids: frozenset[int],
        evidence_key: int | None = None,
        metrics: MetricsBackend | None = None,
    ) -> None:
        self.statistics = StepStatistics()
        self._step = step
        self._new_detokenizer = new_detokenizer
        self._scheduler = Scheduler(settings, end_token_ids, evidence_key)
        self._wake = threading.Condition()
        self._closing = False
        self._responder = Responder(self.cancel, None if metrics is None else EngineMetrics(metrics))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._responder.start()
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> int:
        """Queues a request and returns its sequence id; its responses, or its error, go to `sink`.

        Raises:
            ServerBusy: the queue is full, or the engine is closing.
        """
        stream = TextStream(request, self._new_detokenizer(), sink)
        with self._wake:
            if self._closing:
                raise ServerBusy("the server is shutting down")
            sequence_id = self._scheduler.enqueue(request, stream)
            self._wake.notify()
            return sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Ends a request before the next step; its last response says `cancelled`. Ended ones are ignored."""
        with self._wake:
            self._scheduler.cancel(sequence_id)
            self._wake.notify()

    def close(self) -> None:
        """Ends every request with an error and both threads; waits for the step that is running."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._responder.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._scheduler.has_work)
                if self._closing:
                    self._scheduler.end_all(ServerBusy("the server is shutting down"))
                    outcome = StepOutcome(self._scheduler.take_updates(), [], None)
                    break
                started = time.perf_counter()
                step = self._scheduler.schedule()
            self._run_step(step, started)
        self._responder.post(outcome)

    def _run_step(self, step: ScheduledStep, started: float) -> None:
        if step.is_empty:  # only waiting sequences were cancelled
            with self._wake:
                outcome = StepOutcome(self._scheduler.take_updates(), self._scheduler.sequences(), None)
            self._responder.post(outcome)
            return
        called = returned = started
        result: StepResult | None = None
        try:
            request = self._scheduler.step_request(step)
            called = time.perf_counter()
            answer = self._step(request)
            returned = time.perf_counter()
            with self._wake:
                self._scheduler.apply(step, answer)
            result = answer
        except Exception as exception:
            returned = max(called, returned)
            with self._wake:
                self._scheduler.fail(step, _step_failed(exception))
        with self._wake:
            updates = self._scheduler.take_updates()
            open_sequences = self._scheduler.sequences()
            num_live, num_waiting = self._scheduler.num_live, self._scheduler.num_waiting
        loop_seconds = (called - started) + (time.perf_counter() - returned)
        first_tokens_ms = [update.first_token_ms for update in updates if update.first_token_ms is not None]
        record = _record(step, result, returned - called, loop_seconds, num_live, num_waiting, first_tokens_ms)
        self.statistics.add(record)
        self._responder.post(StepOutcome(updates, open_sequences, record))


def _step_failed(exception: Exception) -> StepFailed:
    logger.error("a decode step failed", exc_info=exception)
    if isinstance(exception, AdaptiveVerificationError):
        return StepFailed(f"the decode step failed: {exception}")
    return StepFailed("the decode step failed; the server's log says why")


def _record(
    step: ScheduledStep,
    result: StepResult | None,
    step_seconds: float,
    loop_seconds: float,
    num_live: int,
    num_waiting: int,
    first_tokens_ms: list[float],
) -> StepRecord:
    def total(counts: torch.Tensor | None) -> int:
        return 0 if counts is None else int(counts.sum())

    output_tokens = 0 if result is None else result.output_tokens.numel()
    sampling_rows = 0 if result is None else int(result.output_count.count_nonzero())
    return StepRecord(
        step_ms=1000 * step_seconds,
        loop_ms=1000 * loop_seconds,
        cost=None if result is None else StepCost.from_tensor(result.step_cost),
        rows=len(step.rows),
        prompt_tokens=step.num_prompt_tokens,
        output_tokens=output_tokens,
        drafted_tokens=total(None if result is None else result.drafted_count),
        admitted_tokens=total(None if result is None else result.admitted_count),
        accepted_tokens=output_tokens - sampling_rows,
        live_sequences=num_live,
        waiting_requests=num_waiting,
        failed=result is None,
        first_tokens=len(first_tokens_ms),
        first_tokens_ms=sum(first_tokens_ms),
    )

"""The thread that talks to clients: what a step did -> text -> responses; cancellation; metrics.

Sending a response and asking whether a client has gone are round trips to the server's process, so they happen here
and overlap the next step. Knows streams and sinks; not how steps are made.

Never more than `MAX_STEPS_BEHIND` steps are kept: where clients are served more slowly than steps are made, a stream's
responses of several steps become one, and if even that does not help, the loop waits. A client that reads slowly costs
memory in the server's process alone, and stops nobody.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from adaptive_verification.errors import AdaptiveVerificationError
from adaptive_verification.generation.sequence import Sequence
from adaptive_verification.generation.statistics import EngineMetrics, StepRecord
from adaptive_verification.generation.text_stream import SequenceUpdate, TextStream

MAX_STEPS_BEHIND = 4
MAX_CANCELLATION_POLLS_PER_STEP = 16
NICENESS = 5
"""Of this thread alone (Linux): a third of a stage's share of a core that both want."""

logger = logging.getLogger(__name__)


class StepOutcome(NamedTuple):
    """What the loop tells the responder after each step."""

    updates: list[SequenceUpdate]
    open_sequences: list[Sequence]
    """All sequences that have not ended."""
    record: StepRecord | None
    """None where nothing was computed."""


class Responder:
    """Owns the thread, and every `TextStream` once it is in the engine."""

    def __init__(self, cancel: Callable[[int], None], metrics: EngineMetrics | None) -> None:
        self._cancel = cancel
        self._metrics = metrics
        self._outcomes: queue.Queue[StepOutcome | None] = queue.Queue(maxsize=MAX_STEPS_BEHIND)
        self._num_polled = 0
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, outcome: StepOutcome) -> None:
        """Hands an outcome over; waits while the responder is `MAX_STEPS_BEHIND`. Hold no lock."""
        self._outcomes.put(outcome)

    def close(self) -> None:
        """Sends what was posted, then ends the thread. Once more does nothing."""
        if self._thread.is_alive():
            self._outcomes.put(None)
            self._thread.join()

    def _run(self) -> None:
        # Where cores are few, text must not hold up the step that is being computed meanwhile.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        closing = False
        while not closing:
            posted = [self._outcomes.get()]
            while not self._outcomes.empty():
                posted.append(self._outcomes.get())
            outcomes = [outcome for outcome in posted if outcome is not None]
            closing = len(outcomes) < len(posted)
            if outcomes:
                self._respond(outcomes)
                self._poll_cancelled(outcomes[-1].open_sequences)
                self._publish(outcomes)

    def _respond(self, outcomes: list[StepOutcome]) -> None:
        streams: dict[int, TextStream] = {}
        for outcome in outcomes:
            for update in outcome.updates:
                streams[update.sequence_id] = update.stream
                with self._abandon_on_failure(update.sequence_id, update.stream):
                    update.stream.take(update)
        for sequence_id, stream in streams.items():
            with self._abandon_on_failure(sequence_id, stream):
                stream.send()
            if stream.stopped:
                self._cancel(sequence_id)

    def _poll_cancelled(self, sequences: list[Sequence]) -> None:
        """Asks for as many sequences as a step may afford, in turn."""
        num_polls = min(len(sequences), MAX_CANCELLATION_POLLS_PER_STEP)
        for _ in range(num_polls):
            self._num_polled += 1
            sequence = sequences[self._num_polled % len(sequences)]
            with self._abandon_on_failure(sequence.id, sequence.stream):
                if sequence.stream.is_cancelled():
                    self._cancel(sequence.id)

    @contextmanager
    def _abandon_on_failure(self, sequence_id: int, stream: TextStream) -> Iterator[None]:
        """Ends a stream whose text cannot be made, or whose client cannot be reached; the others go on."""
        try:
            yield
        except Exception:
            logger.exception("request %d ends: its response failed", sequence_id)
            self._cancel(sequence_id)
            with suppress(Exception):
                stream.fail(AdaptiveVerificationError("the response could not be made; the server's log says why"))

    def _publish(self, outcomes: list[StepOutcome]) -> None:
        if self._metrics is None:
            return
        try:
            for outcome in outcomes:
                if outcome.record is not None:
                    self._metrics.observe(outcome.record)
        except Exception:
            logger.exception("metrics could not be published; none will be from here on")
            self._metrics = None

"""Which sequences are decoded, what the next step computes for each, and what the step's result means for them.

Knows the step contract and its rules; no threads, no text, no Triton. The engine calls it under its lock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from adaptive_verification.contract import hidden_states
from adaptive_verification.contract.messages import (
    COUPLED,
    FILL_ONLY,
    NO_LABEL,
    NOT_FOLLOWED,
    REJECTION,
    STATUS_BAD_TOKEN,
    STATUS_CONTEXT_FULL,
    STATUS_NO_SLOT,
    STATUS_NOT_CACHED,
    STATUS_OK,
    StepRequest,
    StepResult,
)
from adaptive_verification.errors import AdaptiveVerificationError, ServerBusy, StepFailed
from adaptive_verification.generation.request import GenerationRequest
from adaptive_verification.generation.response import FinishReason
from adaptive_verification.generation.sequence import MAX_REFILLS_WITHOUT_PROGRESS, Sequence
from adaptive_verification.generation.text_stream import SequenceUpdate, TextStream
from adaptive_verification.settings import GenerateSettings

ACCEPTANCE = {"rejection": REJECTION, "coupled": COUPLED}
"""The contract's number of each setting."""


_STATUS_REASONS = {
    STATUS_BAD_TOKEN: "a token of the prompt is not in the target's vocabulary; generate and verifier need one target",
    STATUS_NO_SLOT: "every cache slot of a stage is taken; cache_slots must not be less than max_live_sequences",
}


class Row(NamedTuple):
    """A sequence's part in a step."""

    sequence: Sequence
    token_count: int
    draft_limit: int


class ScheduledStep(NamedTuple):
    """The next step: its rows, and the sequences that the stages shall forget."""

    rows: list[Row]
    release: list[int]
    num_prompt_tokens: int

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.release


class Scheduler:
    """First come, first served: a bounded queue before a bounded number of live sequences."""

    def __init__(
        self,
        settings: GenerateSettings,
        end_token_ids: frozenset[int],
        evidence_key: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._end_token_ids = end_token_ids
        self._evidence_key = torch.tensor([] if evidence_key is None else [as_int64(evidence_key)], dtype=torch.int64)
        self._previous_cost = torch.tensor([], dtype=torch.float32)
        self._advised_draft_limit = settings.num_draft_tokens
        self._next_id = secrets.randbits(62)  # other callers of the same stages choose theirs; do not meet them
        self._waiting: dict[int, Sequence] = {}
        self._live: dict[int, Sequence] = {}
        self._release: list[int] = []
        self._cancelled: set[int] = set()
        self._updates: list[SequenceUpdate] = []

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._waiting or self._release or self._cancelled)

    def enqueue(self, request: GenerationRequest, stream: TextStream) -> int:
        """Puts a request into the queue and returns its sequence id.

        Raises:
            ServerBusy: the queue is full.
        """
        free = max(0, self._settings.max_live_sequences - self.num_live)
        if self.num_waiting >= self._settings.max_queued_requests + free:
            raise ServerBusy(
                f"{self.num_live} sequences are being decoded and {self.num_waiting} requests wait; at most "
                f"{self._settings.max_queued_requests} may wait. Try again later"
            )
        self._next_id += 1
        self._waiting[self._next_id] = Sequence(
            id=self._next_id,
            request=request,
            stream=stream,
            max_context_tokens=self._settings.max_context_tokens,
            max_draft_tokens=self._settings.num_draft_tokens,
            submitted_s=self._clock(),
        )
        return self._next_id

    def cancel(self, sequence_id: int) -> None:
        """The sequence ends before the next step; unknown and ended ones are ignored."""
        if sequence_id in self._live or sequence_id in self._waiting:
            self._cancelled.add(sequence_id)

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return [*self._live.values(), *self._waiting.values()]

    def take_updates(self) -> list[SequenceUpdate]:
        """What happened since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def schedule(self) -> ScheduledStep:
        """The next step: all decoding sequences, and prompt chunks within the step's prompt budget."""
        self._end_cancelled()
        while self._waiting and self.num_live < self._settings.max_live_sequences:
            sequence_id = next(iter(self._waiting))
            sequence = self._live[sequence_id] = self._waiting.pop(sequence_id)
            sequence.model_draft_limit = self._advised_draft_limit
        prompt_tokens = self._share_prompt_budget()
        rows = []
        for sequence in self._live.values():
            token_count, draft_limit = sequence.num_pending_tokens, sequence.draft_limit
            if sequence.is_filling:
                share = prompt_tokens[sequence.id]
                if not share:
                    continue
                if token_count > share:
                    token_count, draft_limit = share, FILL_ONLY
            rows.append(Row(sequence, token_count, draft_limit))
            sequence.has_run = True
        release, self._release = self._release, []
        return ScheduledStep(rows, release, sum(prompt_tokens.values()))

    def _share_prompt_budget(self) -> dict[int, int]:
        """Prompt tokens that each filling sequence computes in the next step, by sequence id.

        First come, first served; but a prompt that fills whole steps takes only half of one while others want it, so
        that a short prompt does not wait for a long one to end.
        """
        pending = {sequence.id: sequence.num_pending_tokens for sequence in self._live.values() if sequence.is_filling}
        budget = left = self._settings.max_prompt_tokens_per_step
        shares = dict.fromkeys(pending, 0)
        half = max(1, budget // 2) if len(pending) > 1 else budget
        for limit_of_long in (
            half,
            budget,
        ):  # what nobody else wanted in the first round, the long ones get in the second
            for sequence_id, wanted in pending.items():
                limit = limit_of_long if wanted > budget else budget
                more = max(0, min(wanted, limit) - shares[sequence_id])
                shares[sequence_id] += min(more, left)
                left -= min(more, left)
        return shares

    def step_request(self, step: ScheduledStep) -> StepRequest:
        """The step as the stages take it."""
        sequences = [row.sequence for row in step.rows]
        samplings = [sequence.request.sampling for sequence in sequences]
        tokens: list[int] = []
        for sequence, token_count, _ in step.rows:
            start = sequence.context_length
            tokens += sequence.tokens[start : start + token_count]
        return StepRequest(
            sequence_id=_int64([sequence.id for sequence in sequences]),
            context_length=_int32([sequence.context_length for sequence in sequences]),
            token_count=_int32([row.token_count for row in step.rows]),
            tokens=_int32(tokens),
            draft_limit=_int32([row.draft_limit for row in step.rows]),
            model_draft_limit=_int32([sequence.model_draft_limit for sequence in sequences]),
            temperature=_float32([sampling.temperature for sampling in samplings]),
            top_p=_float32([sampling.top_p for sampling in samplings]),
            top_k=_int32([sampling.top_k for sampling in samplings]),
            seed=_int64([as_int64(sampling.seed) for sampling in samplings]),
            acceptance=_int32([ACCEPTANCE[sampling.acceptance] for sampling in samplings]),
            wants_log_probs=_int32([0] * len(sequences)),
            previous_accepted=_int32([sequence.previous_accepted for sequence in sequences]),
            previous_cost=self._previous_cost,
            **hidden_states.for_rows([sequence.hidden_states for sequence in sequences]),
            release=_int64(step.release),
            evidence_key=self._evidence_key,
        )

    def apply(self, step: ScheduledStep, result: StepResult) -> None:
        """Moves every sequence of the step on, or ends it.

        Raises:
            ContractError: the result is malformed; no sequence was touched.
            StepFailed: likewise.
        """
        result.validate()
        if result.num_rows != len(step.rows):
            raise StepFailed(f"the step answered {result.num_rows} rows; it was asked for {len(step.rows)}")
        # A step that only released measured nothing; the copy lets go of the answer's memory.
        self._previous_cost = (result.step_cost if step.rows else result.step_cost[:0]).clone()
        output_tokens = result.output_tokens.tolist()
        next_draft_limits = result.next_draft_limit.tolist()
        of_followed = [limit for limit in next_draft_limits if limit != NOT_FOLLOWED]
        if of_followed:  # the plan, for sequences that are new; rows that shall explore are advised more than that
            self._advised_draft_limit = min(of_followed)
        for row, states in zip(step.rows, hidden_states.of_rows(result), strict=True):
            row.sequence.hidden_states = states
        start = 0
        for row, output_count, status, admitted_count, next_draft_limit in zip(
            step.rows,
            result.output_count.tolist(),
            result.status.tolist(),
            result.admitted_count.tolist(),
            next_draft_limits,
            strict=True,
        ):
            output = output_tokens[start : start + output_count]
            start += output_count
            if status == STATUS_OK:
                self._advance(row, output, admitted_count, next_draft_limit)
            else:
                self._handle_status(row.sequence, status)

    def fail(self, step: ScheduledStep, error: AdaptiveVerificationError) -> None:
        """Ends the sequences of a step that had no result. A step that only released is not tried again."""
        self._previous_cost = self._previous_cost[:0]
        if step.rows:
            self._release += step.release
        for row in step.rows:
            if row.sequence.id in self._live:
                self._end(row.sequence, error=error)

    def end_all(self, error: AdaptiveVerificationError) -> None:
        """Ends every sequence."""
        for sequence in self.sequences():
            self._end(sequence, error=error)

    def _advance(self, row: Row, output: list[int], admitted_count: int, next_draft_limit: int) -> None:
        sequence = row.sequence
        sequence.context_length += row.token_count
        if row.draft_limit == FILL_ONLY:
            return
        if not 1 <= len(output) <= row.draft_limit + 1:
            error = StepFailed(f"the step gave {len(output)} tokens; it was asked for 1 to {row.draft_limit + 1}")
            self._end(sequence, error=error)
            return
        num_accepted = len(output) - 1
        sequence.model_draft_limit = max(0, next_draft_limit)
        # The two methods accept with different probabilities, and the estimator learns those of one.
        teaches = admitted_count and sequence.request.sampling.acceptance == self._settings.acceptance
        sequence.previous_accepted = num_accepted if teaches else NO_LABEL
        is_first = sequence.num_output_tokens == 0
        tokens, finish_reason = sequence.append_output(output, self._end_token_ids)
        update = SequenceUpdate(
            sequence_id=sequence.id,
            stream=sequence.stream,
            tokens=tokens,
            num_draft_tokens=admitted_count,
            num_accepted_tokens=num_accepted,
            first_token_ms=1e3 * (self._clock() - sequence.submitted_s) if is_first else None,
            ends_with_end_token=finish_reason is FinishReason.STOP,
        )
        if finish_reason is None:
            self._updates.append(update)
        else:
            self._end(sequence, update=update, finish_reason=finish_reason)

    def _handle_status(self, sequence: Sequence, status: int) -> None:
        if status == STATUS_NOT_CACHED:
            if not sequence.refill():
                self._end(
                    sequence,
                    error=StepFailed(
                        f"the stages lost the sequence's cache {MAX_REFILLS_WITHOUT_PROGRESS + 1} times in a row; "
                        "cache_slots of drafter and verifier must be more than max_live_sequences of all callers"
                    ),
                )
        elif status == STATUS_CONTEXT_FULL and sequence.num_output_tokens:
            self._end(sequence, finish_reason=FinishReason.LENGTH)
        elif status == STATUS_CONTEXT_FULL:
            self._end(
                sequence,
                error=StepFailed(
                    f"the prompt's {len(sequence.tokens)} tokens do not fit the stages' caches; max_context_tokens of "
                    "drafter and verifier must not be less than that of generate"
                ),
            )
        else:
            reason = _STATUS_REASONS.get(status, f"the step answered with the unknown status {status}")
            self._end(sequence, error=StepFailed(reason))

    def _end_cancelled(self) -> None:
        for sequence_id in self._cancelled:
            sequence = self._live.get(sequence_id) or self._waiting.get(sequence_id)
            if sequence is not None:  # else it ended by itself meanwhile
                self._end(sequence, finish_reason=FinishReason.CANCELLED)
        self._cancelled.clear()

    def _end(
        self,
        sequence: Sequence,
        *,
        update: SequenceUpdate | None = None,
        finish_reason: FinishReason | None = None,
        error: AdaptiveVerificationError | None = None,
    ) -> None:
        self._live.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        if sequence.has_run:
            self._release.append(sequence.id)
        update = update or SequenceUpdate(sequence_id=sequence.id, stream=sequence.stream)
        update.finish_reason, update.error = finish_reason, error
        self._updates.append(update)


def as_int64(unsigned: int) -> int:
    """A 64-bit unsigned number as the signed one with the same bits (the contract keeps them so)."""
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _float32(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)

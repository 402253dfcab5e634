"""Which sequence owns which cache slot, which tokens it consists of, and how many of them are computed.

Pure bookkeeping: it knows token ids and lengths, nothing of keys, values or models. The rules of the step contract live
here: the caller's tokens are the truth, the longest computed prefix that equals them is reused, everything is bounded.

A slot keeps what it holds until another sequence needs it, so a sequence that begins as an earlier or a present one did
(a system prompt, a conversation's next turn) does not compute that beginning again.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from adaptive_verification.contract import STATUS_CONTEXT_FULL, STATUS_NO_SLOT, STATUS_NOT_CACHED, STATUS_OK
from adaptive_verification.forward.shared_prefix import longest_shared_prefix

MIN_REUSED_TOKENS = 4
"""Fewer are computed rather than looked for and copied."""

CopyPrefix = Callable[[int, int, int, int], None]
"""(from slot, to slot, start, end): copies what the model keeps of positions `start` to `end`."""


@dataclass
class CachedSequence:
    """One sequence and its slot."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    """Confirmed tokens, then drafts whose keys and values are cached too."""
    confirmed_length: int = 0
    computed_length: int = 0
    """Keys and values are valid for the first so many positions; less than the confirmed ones where a stage lags."""
    states_length: int = 0
    """Hidden states of the first so many positions have gone from the verifier to the drafter, as far as the stage
    knows."""
    waiting_states: list[tuple[int, Tensor]] = field(default_factory=list)
    """In the drafter, those of them that its model has not been given yet: neighbouring positions, each chunk from
    one on."""
    last_used: float = 0.0

    def missing_tokens(self) -> list[int]:
        """The confirmed tokens that are not computed yet; they start at position `computed_length`."""
        return self.tokens[self.computed_length : self.confirmed_length]

    def confirm(self, context_length: int, tokens: list[int]) -> None:
        """Takes the caller's tokens as the truth from `context_length` on, and cuts back what was computed
        otherwise."""
        cached = self.tokens[context_length : context_length + len(tokens)]
        if cached == tokens:
            agreed = len(tokens)
        else:
            agreed = next((i for i, (a, b) in enumerate(zip(cached, tokens, strict=False)) if a != b), len(cached))
        self.tokens[context_length:] = tokens
        if context_length < self.confirmed_length:  # a caller that goes back may have lost what it was sent
            self.states_length = min(self.states_length, context_length)
        self.confirmed_length = len(self.tokens)
        self.computed_length = min(self.computed_length, context_length + agreed)
        self.states_length = min(self.states_length, context_length + agreed)

    def mark_computed(self, length: int, drafts: list[int]) -> None:
        """Says after a forward: the first `length` confirmed tokens are computed, and these drafts after all of
        them."""
        self.computed_length = length + len(drafts)
        self.tokens[self.confirmed_length :] = drafts


@dataclass(frozen=True)
class Placement:
    """What became of a row: its status, and its sequence where that is ok."""

    status: int
    sequence: CachedSequence | None = None
    reused_tokens: int = 0
    """Of the row's tokens, those that other sequences had computed."""


class SequenceTable:
    """Slots by sequence id, bounded: by release, by an idle limit, and least recently used when slots run out.

    Args:
        num_slots: sequences kept at most.
        capacity: tokens per sequence at most.
        idle_seconds: a sequence unused for longer loses its slot.
        copy_prefix: the model's; None: what another sequence computed is not reused.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        idle_seconds: float,
        copy_prefix: CopyPrefix | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_slots = num_slots
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._copy_prefix = copy_prefix
        self._clock = clock
        self._sequences: OrderedDict[int, CachedSequence] = OrderedDict()  # least recently used first
        self._free = {slot: CachedSequence(slot) for slot in range(num_slots)}  # with what they still hold
        self._next_slot = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Frees the sequences' slots; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._free[sequence.slot] = sequence

    def place(
        self,
        sequence_ids: list[int],
        context_lengths: list[int],
        tokens_of_rows: list[list[int]],
        statuses: list[int],
    ) -> list[Placement]:
        """Finds or makes room for each row of a step and confirms its tokens.

        Args:
            statuses: rows that are already known not to be ok are left alone and keep their status.
        """
        now = self._clock()
        for sequence_id in sequence_ids:  # what this step uses is not evicted for it
            if sequence_id in self._sequences:
                self._sequences.move_to_end(sequence_id)
                self._sequences[sequence_id].last_used = now
        self._expire(now)
        in_step = frozenset(sequence_ids)
        return [
            Placement(status) if status != STATUS_OK else self._place_row(sequence_id, context_length, tokens, in_step)
            for sequence_id, context_length, tokens, status in zip(
                sequence_ids, context_lengths, tokens_of_rows, statuses, strict=True
            )
        ]

    def _place_row(
        self, sequence_id: int, context_length: int, tokens: list[int], in_step: frozenset[int]
    ) -> Placement:
        if context_length + len(tokens) > self._capacity:
            return Placement(STATUS_CONTEXT_FULL)
        sequence = self._sequences.get(sequence_id)
        if context_length > (sequence.confirmed_length if sequence else 0):
            return Placement(STATUS_NOT_CACHED)
        known = sequence.computed_length if sequence else 0
        if sequence is None:
            sequence = self._take_slot(in_step)
            if sequence is None:
                return Placement(STATUS_NO_SLOT)
            sequence.last_used = self._clock()
            self._sequences[sequence_id] = sequence
        sequence.confirm(context_length, tokens)
        if self._copy_prefix is not None and len(tokens) > MIN_REUSED_TOKENS:
            self._reuse_prefix(sequence, self._copy_prefix)
        return Placement(STATUS_OK, sequence, max(0, sequence.computed_length - known))

    def _reuse_prefix(self, sequence: CachedSequence, copy_prefix: CopyPrefix) -> None:
        """Copies what another slot holds of the sequence's beginning, where that is more than is computed."""
        others = itertools.chain(self._sequences.values(), self._free.values())
        found = longest_shared_prefix(
            sequence.tokens[: sequence.confirmed_length],
            ((other.slot, other.tokens[: other.computed_length]) for other in others),
            more_than=sequence.computed_length + MIN_REUSED_TOKENS,
        )
        if found is not None:
            slot, shared = found
            copy_prefix(slot, sequence.slot, sequence.computed_length, shared)
            sequence.computed_length = shared

    def _expire(self, now: float) -> None:
        expired = []
        for sequence_id, sequence in self._sequences.items():
            if now - sequence.last_used <= self._idle_seconds:
                break
            expired.append(sequence_id)
        self.release(expired)

    def _take_slot(self, in_step: frozenset[int]) -> CachedSequence | None:
        """A free slot, with what it still holds of the sequence's beginning for the sequence to confirm.

        Slots are taken in turn, round and round: what was freed last is kept longest, and sequences that live at the
        same time lie side by side, which attention is fastest over.
        """
        if not self._free:
            victim = next((sequence_id for sequence_id in self._sequences if sequence_id not in in_step), None)
            if victim is None:
                return None
            self.release([victim])
        turns = ((self._next_slot + turn) % self._num_slots for turn in range(self._num_slots))
        slot = next(slot for slot in turns if slot in self._free)
        self._next_slot = slot + 1
        held = self._free.pop(slot)
        if self._copy_prefix is None:
            return CachedSequence(slot)
        return CachedSequence(slot, held.tokens[: held.computed_length], computed_length=held.computed_length)

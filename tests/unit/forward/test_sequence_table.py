"""Slots, reuse and eviction."""

from __future__ import annotations

import pytest

from adaptive_verification.contract import (
    STATUS_BAD_TOKEN,
    STATUS_CONTEXT_FULL,
    STATUS_NO_SLOT,
    STATUS_NOT_CACHED,
    STATUS_OK,
)
from adaptive_verification.forward.sequence_table import MIN_REUSED_TOKENS, CachedSequence, SequenceTable


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SequenceTable:
    return SequenceTable(num_slots=3, capacity=10, idle_seconds=60, clock=clock)


@pytest.fixture
def copies() -> list[tuple[int, int, int, int]]:
    return []


@pytest.fixture
def reusing_table(copies: list[tuple[int, int, int, int]]) -> SequenceTable:
    """Notes what it copies: from slot, to slot, start, end."""
    return SequenceTable(3, 40, 60, copy_prefix=lambda *copied: copies.append(copied))


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def place(table: SequenceTable, sequence_id: int, context_length: int, tokens: list[int]) -> CachedSequence | int:
    """The row's sequence, or its status where that is not ok."""
    (placement,) = table.place([sequence_id], [context_length], [tokens], [STATUS_OK])
    return placement.sequence if placement.sequence is not None else placement.status


def computed(table: SequenceTable, sequence_id: int, tokens: list[int], drafts: list[int]) -> CachedSequence:
    sequence = place(table, sequence_id, 0, tokens)
    assert isinstance(sequence, CachedSequence)
    sequence.mark_computed(len(tokens), drafts)
    return sequence


def test_accepted_drafts_are_not_computed_again(table: SequenceTable) -> None:
    sequence = computed(table, 7, [1, 2, 3], drafts=[4, 5, 6])
    place(table, 7, 3, [4, 5, 9])  # two accepted, then the target's own token
    assert sequence.computed_length == 5
    assert sequence.missing_tokens() == [9]
    assert sequence.tokens == [1, 2, 3, 4, 5, 9]


def test_a_repeated_step_computes_nothing_new(table: SequenceTable) -> None:
    sequence = computed(table, 7, [1, 2, 3], drafts=[4])
    place(table, 7, 0, [1, 2, 3])
    assert sequence.missing_tokens() == []


def test_the_callers_tokens_win_over_the_cached_ones(table: SequenceTable) -> None:
    sequence = computed(table, 7, [1, 2, 3], drafts=[])
    place(table, 7, 1, [8, 3])
    assert sequence.tokens == [1, 8, 3]
    assert sequence.computed_length == 1


def test_a_row_that_only_takes_note_lags_and_catches_up(table: SequenceTable) -> None:
    sequence = computed(table, 7, [1, 2], drafts=[])
    place(table, 7, 2, [3])
    place(table, 7, 3, [4, 5])
    assert sequence.missing_tokens() == [3, 4, 5]
    sequence.mark_computed(4, [])
    assert sequence.missing_tokens() == [5]


def test_an_unconfirmed_prefix_is_not_taken_for_granted(table: SequenceTable) -> None:
    computed(table, 7, [1, 2, 3], drafts=[4, 5])
    assert place(table, 7, 4, [5]) == STATUS_NOT_CACHED  # the caller never confirmed 4
    assert place(table, 8, 2, [3]) == STATUS_NOT_CACHED  # never seen at all
    assert 8 not in table


def test_a_failed_forward_leaves_nothing_computed(table: SequenceTable) -> None:
    sequence = computed(table, 7, [1, 2], drafts=[3])
    place(table, 7, 2, [3, 4])  # the forward would compute 4, and fails
    place(table, 7, 2, [3, 4])
    assert sequence.missing_tokens() == [4]


def test_the_least_recently_used_sequence_goes_when_slots_run_out(table: SequenceTable) -> None:
    for sequence_id in (1, 2, 3):
        place(table, sequence_id, 0, [5])
    place(table, 1, 1, [6])
    place(table, 4, 0, [5])
    assert 2 not in table
    assert 1 in table
    assert place(table, 2, 1, [6]) == STATUS_NOT_CACHED


def test_a_sequence_of_the_same_step_is_never_evicted(table: SequenceTable) -> None:
    placements = table.place([1, 2, 3, 4], [0] * 4, [[5]] * 4, [STATUS_OK] * 4)
    assert [placement.status for placement in placements] == [STATUS_OK, STATUS_OK, STATUS_OK, STATUS_NO_SLOT]


def test_an_idle_sequence_loses_its_slot(table: SequenceTable, clock: Clock) -> None:
    place(table, 1, 0, [5])
    clock.seconds = 50.0
    place(table, 2, 0, [5])
    clock.seconds = 100.0
    place(table, 3, 0, [5])
    assert 1 not in table
    assert 2 in table


def test_a_sequence_in_use_does_not_expire_however_long_its_last_step_is_past(
    table: SequenceTable, clock: Clock
) -> None:
    place(table, 1, 0, [5])
    clock.seconds = 1000.0
    assert isinstance(place(table, 1, 1, [6]), CachedSequence)


def test_slots_are_taken_in_turn(table: SequenceTable) -> None:
    slots = []
    for sequence_id in range(5):
        sequence = place(table, sequence_id, 0, [5])
        assert isinstance(sequence, CachedSequence)
        slots.append(sequence.slot)
        table.release([sequence_id, 99])
    assert slots == [0, 1, 2, 0, 1]
    assert len(table) == 0


def test_a_slot_in_use_is_passed_over(table: SequenceTable) -> None:
    for sequence_id in (1, 2, 3):
        place(table, sequence_id, 0, [5])
    table.release([2])
    sequence = place(table, 4, 0, [5])
    assert isinstance(sequence, CachedSequence)
    assert sequence.slot == 1


def test_a_sequence_longer_than_its_slot_is_turned_away(table: SequenceTable) -> None:
    assert place(table, 1, 0, [5] * 11) == STATUS_CONTEXT_FULL
    assert isinstance(place(table, 1, 0, [5] * 10), CachedSequence)


def test_a_row_that_is_not_ok_keeps_its_status_and_takes_no_slot(table: SequenceTable) -> None:
    (placement,) = table.place([1], [0], [[5]], [STATUS_BAD_TOKEN])
    assert placement.status == STATUS_BAD_TOKEN
    assert len(table) == 0


def test_what_a_live_sequence_computed_is_copied(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    computed(reusing_table, 1, PROMPT, drafts=[9, 10])
    (placement,) = reusing_table.place([2], [0], [[*PROMPT, 9, 11]], [STATUS_OK])
    assert copies == [(0, 1, 0, 9)], "its drafts are as good as confirmed tokens"
    assert placement.sequence is not None
    assert placement.sequence.missing_tokens() == [11]
    assert placement.reused_tokens == 9


def test_what_was_released_is_copied_until_its_slot_is_taken(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    computed(reusing_table, 1, PROMPT, drafts=[])
    reusing_table.release([1])
    computed(reusing_table, 2, [20] * 6, drafts=[])
    place(reusing_table, 3, 0, [*PROMPT, 9])
    assert copies == [(0, 2, 0, 8)]
    computed(reusing_table, 4, [30] * 6, drafts=[])  # in slot 0
    reusing_table.release([3])  # which computed nothing more
    place(reusing_table, 5, 0, [*PROMPT[:7], 9])
    assert copies[1:] == [], "slot 2 still held it, and was taken for it"


def test_a_sequence_that_gets_the_slot_of_its_own_beginning_copies_nothing(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    for sequence_id in (1, 2, 3):
        computed(reusing_table, sequence_id, [sequence_id, *PROMPT], drafts=[9])
    reusing_table.release([1])
    (placement,) = reusing_table.place([4], [0], [[1, *PROMPT, 12, 13]], [STATUS_OK])
    assert placement.sequence is not None
    assert (placement.sequence.missing_tokens(), placement.reused_tokens) == ([12, 13], 9)
    assert placement.sequence.states_length == 0, "no states of this sequence were sent"
    assert copies == []


def test_a_slot_that_is_taken_again_holds_no_more_than_was_computed(reusing_table: SequenceTable) -> None:
    sequence = place(reusing_table, 1, 0, PROMPT)
    assert isinstance(sequence, CachedSequence)
    sequence.mark_computed(3, [])  # and never more
    for sequence_id in (2, 3):
        place(reusing_table, sequence_id, 0, [sequence_id] * 8)
    reusing_table.release([1])
    again = place(reusing_table, 4, 0, PROMPT)
    assert isinstance(again, CachedSequence)
    assert (again.slot, again.missing_tokens()) == (0, PROMPT[3:])


def test_the_next_chunk_of_a_prompt_is_copied_too(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    computed(reusing_table, 1, PROMPT * 2, drafts=[])
    place(reusing_table, 2, 0, PROMPT)
    sequence = place(reusing_table, 2, 8, [*PROMPT[:6], 99])
    assert copies == [(0, 1, 0, 8), (0, 1, 8, 14)]
    assert isinstance(sequence, CachedSequence)
    assert sequence.missing_tokens() == [99]


def test_what_is_not_computed_yet_is_not_copied(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    placements = reusing_table.place([1, 2], [0, 0], [PROMPT, PROMPT], [STATUS_OK] * 2)
    assert copies == []
    assert [placement.reused_tokens for placement in placements] == [0, 0]


def test_a_few_shared_tokens_are_computed(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    computed(reusing_table, 1, PROMPT, drafts=[])
    place(reusing_table, 2, 0, [*PROMPT[:MIN_REUSED_TOKENS], 99, 98])
    assert copies == []


def test_a_sequence_that_goes_on_reuses_nothing(
    reusing_table: SequenceTable, copies: list[tuple[int, int, int, int]]
) -> None:
    computed(reusing_table, 1, PROMPT, drafts=[9, 10, 11, 12, 13, 14])
    (placement,) = reusing_table.place([1], [8], [[9, 10, 11, 12, 13, 99]], [STATUS_OK])
    assert (placement.reused_tokens, copies) == (0, [])


def test_without_prefix_caching_a_slot_that_is_taken_again_holds_nothing(table: SequenceTable) -> None:
    for sequence_id in (1, 2, 3):
        computed(table, sequence_id, PROMPT, drafts=[])
    table.release([1])
    sequence = place(table, 4, 0, PROMPT)
    assert isinstance(sequence, CachedSequence)
    assert sequence.missing_tokens() == PROMPT


def test_states_are_sent_again_to_a_caller_that_goes_back(table: SequenceTable) -> None:
    sequence = computed(table, 1, PROMPT, drafts=[9])
    sequence.states_length = 9
    place(table, 1, 8, [9])
    assert sequence.states_length == 9
    place(table, 1, 2, [*PROMPT[2:], 9])
    assert (sequence.states_length, sequence.computed_length) == (2, 9)

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
from adaptive_verification.forward.sequence_table import CachedSequence, SequenceTable


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


def test_released_slots_are_used_again_lowest_first(table: SequenceTable) -> None:
    for sequence_id in (1, 2, 3):
        place(table, sequence_id, 0, [5])
    table.release([2, 1, 99])
    sequence = place(table, 4, 0, [5])
    assert isinstance(sequence, CachedSequence)
    assert sequence.slot == 0
    assert len(table) == 2


def test_a_sequence_longer_than_its_slot_is_turned_away(table: SequenceTable) -> None:
    assert place(table, 1, 0, [5] * 11) == STATUS_CONTEXT_FULL
    assert isinstance(place(table, 1, 0, [5] * 10), CachedSequence)


def test_a_row_that_is_not_ok_keeps_its_status_and_takes_no_slot(table: SequenceTable) -> None:
    (placement,) = table.place([1], [0], [[5]], [STATUS_BAD_TOKEN])
    assert placement.status == STATUS_BAD_TOKEN
    assert len(table) == 0

from __future__ import annotations

import pytest

from adaptive_verification.errors import ContractError
from adaptive_verification.estimation.sequences import SequenceMemory


def test_a_sequence_keeps_its_slot_and_its_values() -> None:
    memory = SequenceMemory(4, 2)
    first, fresh = memory.slots([7, 8])
    assert fresh == first.tolist()
    memory.residual_sum[first] = [1.0, 2.0]
    assert memory.slots([8, 9, 7])[0][[2, 0]].tolist() == first.tolist()
    assert memory.residual_sum[memory.slots([7, 8])[0]].tolist() == [1.0, 2.0]


def test_a_released_sequence_is_forgotten_and_its_slot_comes_back_empty() -> None:
    memory = SequenceMemory(1, 2)
    slot, _ = memory.slots([7])
    memory.has_block[slot], memory.admitted[slot], memory.exploring[slot] = True, 5, True
    memory.residual_sum[slot], memory.information_sum[slot] = 3.0, 4.0
    memory.release([7, 99])
    assert 7 not in memory
    slot, fresh = memory.slots([8])
    assert fresh == slot.tolist()
    assert not memory.has_block[slot]
    assert not memory.exploring[slot]
    assert [values[slot].item() for values in (memory.admitted, memory.residual_sum, memory.information_sum)] == [
        0,
        0,
        0,
    ]


def test_the_least_recently_used_sequence_makes_room_and_never_one_of_the_step() -> None:
    memory = SequenceMemory(3, 2)
    memory.slots([1, 2, 3])
    memory.slots([1])
    slots, _ = memory.slots([4, 5, 2])  # 2 is the oldest, and in this step
    assert len(set(slots.tolist())) == 3
    assert [sequence in memory for sequence in (1, 2, 3, 4, 5)] == [False, True, False, True, True]
    assert len(memory) == 3


def test_more_rows_than_slots_are_refused() -> None:
    with pytest.raises(ContractError, match="SEQUENCE_ID has 3 rows"):
        SequenceMemory(2, 2).slots([1, 2, 3])

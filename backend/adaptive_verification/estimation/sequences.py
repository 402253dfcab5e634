"""What the estimator remembers of each sequence between two steps, bounded.

For every sequence: the last block (what its drafts were like, how many of them were admitted, at which length) until
its labels arrive, what its next block may expect, and its residual history. The least recently used sequence
is forgotten when there is no room; `release` forgets at once. Pure storage: what to put there is the stage's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.errors import ContractError
from adaptive_verification.estimation.features import DRAFT_FEATURES


class SequenceMemory:
    """One row of preallocated arrays for each sequence.

    Args:
        capacity: sequences remembered at most; also the most rows of one step.
        num_positions: K.
        num_shared: m, numbers of a draft that the fit predicts from.
    """

    def __init__(self, capacity: int, num_positions: int, num_shared: int = 1) -> None:
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._free = list(range(capacity - 1, -1, -1))
        self.capacity = capacity
        self.has_block = np.zeros(capacity, dtype=bool)
        self.confirmed_tokens = np.zeros(capacity, dtype=np.int64)
        """Confirmed tokens when the last block was drafted."""
        self.modelled_tokens = np.zeros(capacity, dtype=np.int64)
        """Confirmed tokens when a model last drafted: so many it has computed; 0: it never did."""
        self.admitted = np.zeros(capacity, dtype=np.int64)
        """Drafts of the last block that await their labels."""
        self.match_length = np.zeros(capacity, dtype=np.int64)
        """Of the last block where it was looked up; 0: it was drafted by a model."""
        self.followed = np.zeros(capacity, dtype=bool)
        """Whether a model can draft for it, as far as is known."""
        self.exploring = np.zeros(capacity, dtype=bool)
        """Whether the next block keeps all its drafts."""
        self.log_odds = np.zeros((capacity, num_positions), dtype=np.float32)
        """Of the last block, as the next five."""
        self.has_draft_features = np.zeros(capacity, dtype=bool)
        self.draft_features = np.zeros((capacity, num_positions, len(DRAFT_FEATURES)), dtype=np.float32)
        """Only where it has them."""
        self.design = np.zeros((capacity, num_positions, num_shared), dtype=np.float32)
        """What the fit predicted from."""
        self.prediction = np.zeros((capacity, num_positions), dtype=np.float32)
        self.unaided_prediction = np.zeros((capacity, num_positions), dtype=np.float32)
        """Without the sequence's history."""
        self.survival = np.zeros((capacity, num_positions), dtype=np.float32)
        """Of the last block that a model drafted, or could have."""
        self.residual_sum = np.zeros(capacity, dtype=np.float32)
        self.information_sum = np.zeros(capacity, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slot_of

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forgets the sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            slot = self._slot_of.pop(sequence_id, None)
            if slot is not None:
                self._free.append(slot)

    def slots(self, sequence_ids: list[int]) -> tuple[NDArray[np.int64], list[int]]:
        """The slot of each sequence, and those of them that are new: empty but for their `survival`, and followed.

        Raises:
            ContractError: more rows than sequences can be remembered.
        """
        if len(sequence_ids) > self.capacity:
            raise ContractError(
                f"SEQUENCE_ID has {len(sequence_ids)} rows; the estimator's max_sequences allows {self.capacity}"
            )
        slot_of = self._slot_of
        for sequence_id in sequence_ids:  # what this step uses is not evicted for it
            if sequence_id in slot_of:
                slot_of.move_to_end(sequence_id)
        fresh = []
        for sequence_id in sequence_ids:
            if sequence_id not in slot_of:
                slot = self._free.pop() if self._free else slot_of.popitem(last=False)[1]
                slot_of[sequence_id] = slot
                fresh.append(slot)
        if fresh:
            self.has_block[fresh] = False
            self.modelled_tokens[fresh] = 0
            self.admitted[fresh] = 0
            self.followed[fresh] = True
            self.exploring[fresh] = False
            self.residual_sum[fresh] = 0.0
            self.information_sum[fresh] = 0.0
        return np.array([slot_of[sequence_id] for sequence_id in sequence_ids], dtype=np.int64), fresh

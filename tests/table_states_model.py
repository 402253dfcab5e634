"""A hidden-state drafter whose distributions are a table, and which checks every state it is given.

Stands where `HiddenStateModel` stands, beside a `TableModel` target with hidden states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.forward.row import Row
from tests.table_model import state_after

OWN_STATE = -1.0


class TableStatesModel(HiddenStateModel):
    """`distribution(prefix)` gives the probabilities over `token_ids`."""

    def __init__(
        self,
        vocab_size: int,
        distribution: Callable[[tuple[int, ...]], Tensor],
        token_ids: list[int],
        num_slots: int = 4,
        capacity: int = 64,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.capacity = capacity
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.states_width = 1
        self.token_ids = torch.tensor(token_ids)
        self.num_computed_tokens = 0
        self._distribution = distribution
        self._cached = [[-1] * capacity for _ in range(num_slots)]
        self._given: list[dict[int, float]] = [{} for _ in range(num_slots)]

    def write_states(self, slots: Tensor, positions: Tensor, states: Tensor) -> None:
        for slot, position, state in zip(slots.tolist(), positions.tolist(), states[:, 0].tolist(), strict=True):
            self._given[slot][position] = state

    def copy_prefix(self, from_slot: int, to_slot: int, start: int, end: int) -> None:
        self._cached[to_slot][start:end] = self._cached[from_slot][start:end]

    def clear_states(self, slot: int, start: int, end: int) -> None:
        for position in range(start, end):
            self._given[slot][position] = OWN_STATE

    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor:
        logits, ends, last = [], [], []
        tokens = token_ids.tolist()
        self.num_computed_tokens += len(tokens)
        for row in rows:
            cached, given = self._cached[row.slot], self._given[row.slot]
            for position in range(row.context_length, row.context_length + row.query_length):
                cached[position] = tokens.pop(0)
                prefix = tuple(cached[: position + 1])
                if position:
                    state = given[position - 1]
                    assert state in (OWN_STATE, state_after(prefix[:-1])), f"another sequence's state before {prefix}"
                logits.append(self._distribution(prefix)[self.token_ids].to(torch.float64).log())
                ends.append((row.slot, position))
            last.append(len(logits) - 1)
        places = last if logits_at is None else logits_at.tolist()
        for slot, position in (ends[place] for place in places):
            self._given[slot][position] = OWN_STATE
        return torch.stack(logits)[places]

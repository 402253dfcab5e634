"""Which hidden states go back to the drafter: of the rows it follows, those of confirmed tokens that it lacks.

These are the tokens that the step confirmed. Where a sequence began with another one's prefix, was not followed so far,
or goes back, they are the earlier ones too: the target keeps its states as it keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.sequence_table import CachedSequence


class HandedOn(NamedTuple):
    """The fields of the same names in a `StepResult`."""

    hidden_start: Tensor
    hidden_count: Tensor
    hidden_states: Tensor


@dataclass(frozen=True)
class FollowedRow:
    """A row whose states are wanted."""

    index: int
    """In the request."""
    sequence: CachedSequence
    length: int
    """Tokens that are confirmed now, and computed."""


def handed_on(model: CausalModel, rows: Iterable[FollowedRow], num_rows: int) -> HandedOn:
    """The rows' states as bytes; notes in the sequences how far they have gone.

    Args:
        num_rows: of the request.
    """
    start = torch.zeros(num_rows, dtype=torch.int32)
    count = torch.zeros(num_rows, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for row in rows:
        first, row.sequence.states_length = row.sequence.states_length, row.length
        start[row.index], count[row.index] = first, row.length - first
        slots += [row.sequence.slot] * (row.length - first)
        positions += range(first, row.length)
    if not positions:
        return HandedOn(start, count, torch.empty(0, dtype=torch.uint8))
    states = model.hidden_states(torch.tensor(slots), torch.tensor(positions))
    return HandedOn(start, count, states.view(torch.uint8).flatten())

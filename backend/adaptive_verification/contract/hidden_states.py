"""The target's hidden states on their way from a step's result to the next step's request, row by row.

A caller of the step keeps each sequence's states without looking at them, and sends them with the sequence's next row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from adaptive_verification.contract.message import split_wide
from adaptive_verification.contract.messages import StepResult


class RowStates(NamedTuple):
    """One row's."""

    start: int
    """Position of the first."""
    num_states: int
    states: Tensor
    """`[num_states * width]` uint8, wherever the verifier made them."""


NO_STATES = RowStates(0, 0, torch.empty(0, dtype=torch.uint8))


class RequestFields(TypedDict):
    """The fields of the same names in a `StepRequest`."""

    previous_hidden_start: Tensor
    previous_hidden_count: Tensor
    previous_hidden_states: Tensor


def of_rows(result: StepResult) -> list[RowStates]:
    """What each row of a validated result hands on to its sequence's next row."""
    counts = result.hidden_count.tolist()
    parts = split_wide(result.hidden_states, counts)
    return [RowStates(*row) for row in zip(result.hidden_start.tolist(), counts, parts, strict=True)]


def for_rows(rows: Sequence[RowStates]) -> RequestFields:
    """The fields of a request with these rows."""
    there = [row.states for row in rows if row.num_states]
    return RequestFields(
        previous_hidden_start=torch.tensor([row.start for row in rows], dtype=torch.int32),
        previous_hidden_count=torch.tensor([row.num_states for row in rows], dtype=torch.int32),
        previous_hidden_states=torch.cat(there) if there else NO_STATES.states,
    )

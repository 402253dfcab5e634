"""Which hidden states go back to the drafter: of the rows it follows, those of the tokens that this step confirmed.

A row's packed tokens are the confirmed ones that its cache lacked, then its admitted drafts. The first of these are
confirmed whatever happens, and as many of the drafts as were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.row import Row


class HandedOn(NamedTuple):
    """The fields of the same names in a `StepResult`."""

    hidden_start: Tensor
    hidden_count: Tensor
    hidden_states: Tensor


def nothing(num_rows: int) -> HandedOn:
    """For rows that need no hidden states."""
    none = torch.zeros(num_rows, dtype=torch.int32)
    return HandedOn(none, none, torch.empty(0, dtype=torch.uint8))


def confirmed(
    model: CausalModel,
    rows: list[Row],
    request_rows: list[int],
    num_rejected: list[int],
    wanted: list[bool],
    num_rows: int,
) -> HandedOn:
    """The states of each wanted row's packed tokens, without its last `num_rejected`, as bytes.

    Args:
        model: has just run over `rows`.
        request_rows, num_rejected, wanted: of each of `rows`; the first says which row of the request it is.
        num_rows: of the request.
    """
    start = torch.zeros(num_rows, dtype=torch.int32)
    count = torch.zeros(num_rows, dtype=torch.int32)
    kept: list[int] = []
    offset = 0
    for row, index, rejected, is_wanted in zip(rows, request_rows, num_rejected, wanted, strict=True):
        if is_wanted:
            start[index], count[index] = row.context_length, row.query_length - rejected
            kept += range(offset, offset + row.query_length - rejected)
        offset += row.query_length
    if not kept:
        return nothing(num_rows)
    places = torch.tensor(kept, device=model.device) if len(kept) < offset else None
    return HandedOn(start, count, model.hidden_states(places).view(torch.uint8).flatten())

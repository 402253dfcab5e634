"""A step's rows as arrays: what is known of them before any draft is scored, and the shapes that scoring needs.

All of it follows from the confirmed tokens and from what the caller asks for, never from the drafts' tokens or scores,
so the budget may rest on it. The exception is how many drafts a model made, which may follow from what it drew: where
that matters, `limits` says what it could have made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_verification.contract.messages import COUPLED, FILL_ONLY, STATUS_OK, Draft, StepRequest
from adaptive_verification.estimation.prefixes import prefixes


@dataclass(frozen=True)
class StepRows:
    """All `[rows]`; int64 but for the masks."""

    slots: NDArray[np.int64]
    """Of the sequences in the estimator's memory."""
    confirmed_tokens: NDArray[np.int64]
    new_tokens: NDArray[np.int64]
    """How many of the confirmed ones this step brings."""
    begins: NDArray[np.bool_]
    """Rows that are sent from their first token on."""
    served: NDArray[np.bool_]
    """Rows that the drafter could place; the others get no output."""
    asked: NDArray[np.int64]
    """Drafts that the caller allows; FILL_ONLY where none is sampled, also of rows that are not served."""
    drafted: NDArray[np.int64]
    """Drafts that were made."""
    counts: NDArray[np.int64]
    """Those of them that are looked at: at most K."""
    match_length: NDArray[np.int64]
    """Of rows whose drafts were looked up; 0 of the others."""
    looked_up: NDArray[np.bool_]
    limits: NDArray[np.int64]
    """Drafts that the row could have had: those allowed to a model, or those that were looked up."""
    settled: bool
    """See `Block.settled`."""

    @classmethod
    def of(cls, request: StepRequest, draft: Draft, slots: NDArray[np.int64], num_positions: int) -> StepRows:
        """The rows of a request, of which the first `num_positions` drafts are looked at."""
        columns = (
            *(request.context_length, request.token_count, request.draft_limit, request.model_draft_limit),
            *(request.acceptance, draft.draft_status, draft.drafted_count, draft.draft_match_length),
        )
        together = torch.stack(columns).numpy().astype(np.int64)  # one conversion, and one type from here on
        context_length, new_tokens, draft_limit, model_draft_limit, acceptance, status, drafted, match_length = together
        served = status == STATUS_OK
        asked = np.where(served, draft_limit, FILL_ONLY)
        counts = np.minimum(drafted, num_positions)
        match_length = match_length * (drafted > 0)
        looked_up = match_length > 0
        limits = np.maximum(np.minimum(np.minimum(asked, model_draft_limit), num_positions), 0)
        unsettled = (acceptance != COUPLED) & (draft_limit != FILL_ONLY)
        return cls(
            slots=slots,
            confirmed_tokens=context_length + new_tokens,
            new_tokens=new_tokens,
            begins=context_length == 0,
            served=served,
            asked=asked,
            drafted=drafted,
            counts=counts,
            match_length=match_length,
            looked_up=looked_up,
            limits=np.where(looked_up, counts, limits),
            settled=not np.count_nonzero(unsettled),
        )

    @property
    def num_sampling(self) -> int:
        return int(np.count_nonzero(self.asked != FILL_ONLY))

    def padded(self, values: NDArray[np.float32], num_positions: int) -> NDArray[np.float32]:
        """The drafts' values, ragged `[drafts, ...]`, as `[rows, num_positions, ...]`; what rows lack is arbitrary."""
        if values.size == 0:
            return np.zeros((self.drafted.size, num_positions, *values.shape[1:]), dtype=np.float32)
        index = (self.drafted.cumsum() - self.drafted)[:, None] + np.arange(num_positions)
        return values.take(index, 0, mode="clip")


def labels(
    accepted_count: NDArray[Any], admitted: NDArray[np.int64], num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of rows' drafts `[rows, num_positions]`: which the target accepted, and which it decided; 0 or 1.

    Args:
        accepted_count, admitted: `[rows]`.
    """
    decided_count = np.minimum(accepted_count + 1, admitted)
    return (
        prefixes(accepted_count, num_positions).astype(np.float32),
        prefixes(decided_count, num_positions).astype(np.float32),
    )

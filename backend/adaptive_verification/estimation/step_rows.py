"""A step's rows as arrays: what is known of them before any draft is scored, and the shapes that scoring needs.

All of it follows from the confirmed tokens and from what the caller asks for, never from the drafts' tokens or scores,
so the budget may rest on it. The exception is how many drafts a model made, which may follow from what it drew: where
that matters, `limits` says what it could have made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled
from adaptive_verification.contract.messages import COUPLED, FILL_ONLY, STATUS_OK, Draft, StepRequest


class StepRows(NamedTuple):
    """All `[rows]`; int64 but for the masks."""

    slots: NDArray[np.int64]
    """Of the sequences in the estimator's memory."""
    confirmed_tokens: NDArray[np.int64]
    begins: NDArray[np.bool_]
    """Rows that are sent from their first token on."""
    new_tokens: NDArray[np.int64]
    """How many of the confirmed ones this step brings."""
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
    num_sampling: int
    """Rows that a token is sampled for."""
    settled: bool
    """See `Block.settled`."""

    @classmethod
    def of(cls, request: StepRequest, draft: Draft, slots: NDArray[np.int64], num_positions: int) -> StepRows:
        """The rows of a request, of which the first `num_positions` drafts are looked at."""
        fields = _step_rows(
            request.context_length.numpy(),
            request.token_count.numpy(),
            request.draft_limit.numpy(),
            request.model_draft_limit.numpy(),
            request.acceptance.numpy(),
            draft.draft_status.numpy(),
            draft.drafted_count.numpy(),
            draft.draft_match_length.numpy(),
            num_positions,
        )
        return cls(slots, *fields)

    @property
    def context_tokens(self) -> int:
        """Confirmed tokens of all rows that are served."""
        return int(self.confirmed_tokens[self.served].sum())

    def padded(self, values: NDArray[np.float32], num_positions: int) -> NDArray[np.float32]:
        """The drafts' values, ragged `[drafts, n]`, as `[rows, num_positions, n]`; 0 where a row has no draft."""
        return _padded(values, self.drafted, num_positions)


@compiled
def labels(
    accepted_count: NDArray[Any], admitted: NDArray[np.int64], num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of rows' drafts `[rows, num_positions]`: which the target accepted, and which it decided; 0 or 1.

    Args:
        accepted_count, admitted: `[rows]`.
    """
    accepted = np.zeros((len(admitted), num_positions), np.float32)
    decided = np.zeros((len(admitted), num_positions), np.float32)
    for row in range(len(admitted)):
        for position in range(min(accepted_count[row] + 1, admitted[row])):
            accepted[row, position] = position < accepted_count[row]
            decided[row, position] = 1
    return accepted, decided


@compiled
def _step_rows(
    context_length: NDArray[np.int32],
    new_tokens: NDArray[np.int32],
    draft_limit: NDArray[np.int32],
    model_draft_limit: NDArray[np.int32],
    acceptance: NDArray[np.int32],
    draft_status: NDArray[np.int32],
    drafted: NDArray[np.int32],
    draft_match_length: NDArray[np.int32],
    num_positions: int,
) -> tuple[Any, ...]:
    """The fields of `StepRows` behind the slots."""
    rows = len(context_length)
    confirmed, asked, counts = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
    match_length, limits = np.empty(rows, np.int64), np.empty(rows, np.int64)
    num_sampling, settled = 0, True
    for row in range(rows):
        confirmed[row] = context_length[row] + new_tokens[row]
        asked[row] = draft_limit[row] if draft_status[row] == STATUS_OK else FILL_ONLY
        counts[row] = min(drafted[row], num_positions)
        match_length[row] = draft_match_length[row] if drafted[row] > 0 else 0
        allowed = max(min(asked[row], model_draft_limit[row], num_positions), 0)
        limits[row] = counts[row] if match_length[row] > 0 else allowed
        num_sampling += asked[row] != FILL_ONLY
        settled = settled and (acceptance[row] == COUPLED or draft_limit[row] == FILL_ONLY)
    return (
        confirmed,
        context_length == 0,
        new_tokens.astype(np.int64),
        draft_status == STATUS_OK,
        asked,
        drafted.astype(np.int64),
        counts,
        match_length,
        match_length > 0,
        limits,
        num_sampling,
        settled,
    )


@compiled
def _padded(values: NDArray[np.float32], drafted: NDArray[np.int64], num_positions: int) -> NDArray[np.float32]:
    """See `StepRows.padded`."""
    num_values, width = values.shape
    padded = np.zeros((len(drafted), num_positions, width), np.float32)
    first = 0
    for row in range(len(drafted)):
        for position in range(min(drafted[row], num_positions, num_values - first)):
            for i in range(width):
                padded[row, position, i] = values[first + position, i]
        first += drafted[row]
    return padded

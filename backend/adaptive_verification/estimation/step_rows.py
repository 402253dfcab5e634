"""A step's rows as arrays: what is known of them before any draft is scored, and the shapes that scoring needs.

All of it follows from the confirmed tokens and from what the caller asks for, never from the drafts' tokens or scores,
so the budget may rest on it. The exception is how many drafts a model made, which may follow from what it drew: where
that matters, `limits` says what it could have made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.contract.messages import COUPLED, FILL_ONLY, STATUS_OK, Draft, StepRequest


@dataclass(frozen=True)
class StepRows:
    """All `[rows]`; int64 where not said otherwise."""

    slots: NDArray[np.int64]
    """Of the sequences in the estimator's memory."""
    confirmed_tokens: NDArray[np.int64]
    new_tokens: NDArray[np.int32]
    """How many of the confirmed ones this step brings."""
    served: NDArray[np.bool_]
    """Rows that the drafter could place; the others get no output."""
    asked: NDArray[np.int32]
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
    def of(cls, request: StepRequest, draft: Draft, slots: NDArray[np.int64], deepest: int) -> StepRows:
        """The rows of a request, of which `deepest` drafts are looked at."""
        new_tokens, draft_limit = request.token_count.numpy(), request.draft_limit.numpy()
        served = draft.draft_status.numpy() == STATUS_OK
        asked = np.where(served, draft_limit, FILL_ONLY)
        drafted = draft.drafted_count.numpy().astype(np.int64)
        counts = np.minimum(drafted, deepest)
        match_length = np.multiply(draft.draft_match_length.numpy(), drafted > 0, dtype=np.int64)
        looked_up = match_length > 0
        limits = np.minimum(asked, request.model_draft_limit.numpy())
        limits = np.maximum(np.minimum(limits, deepest), 0, dtype=np.int64)
        return cls(
            slots=slots,
            confirmed_tokens=np.add(request.context_length.numpy(), new_tokens, dtype=np.int64),
            new_tokens=new_tokens,
            served=served,
            asked=asked,
            drafted=drafted,
            counts=counts,
            match_length=match_length,
            looked_up=looked_up,
            limits=np.where(looked_up, counts, limits),
            settled=bool(((request.acceptance.numpy() == COUPLED) | (draft_limit == FILL_ONLY)).all()),
        )

    @property
    def depth(self) -> int:
        """Of the deepest row, made or possible."""
        return int(max(self.counts.max(initial=0), self.limits.max(initial=0)))

    @property
    def num_sampling(self) -> int:
        return int(np.count_nonzero(self.asked != FILL_ONLY))

    def padded(self, values: NDArray[np.float32], depth: int) -> NDArray[np.float32]:
        """The drafts' values, ragged `[drafts, ...]`, as `[rows, depth, ...]`; what a row lacks is arbitrary."""
        if values.size == 0:
            return np.zeros((self.drafted.size, depth, *values.shape[1:]), dtype=np.float32)
        index = (self.drafted.cumsum() - self.drafted)[:, None] + np.arange(depth)
        return values[index.clip(max=len(values) - 1)]


def labels(
    accepted_count: NDArray[np.int32], admitted: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of rows' admitted drafts `[rows, k]`: which the target accepted, and which it decided; 0 or 1."""
    position = np.arange(admitted.max(initial=0))
    accepted = position < accepted_count[:, None]
    labelled = position < np.minimum(accepted_count + 1, admitted)[:, None]
    return accepted.astype(np.float32), labelled.astype(np.float32)

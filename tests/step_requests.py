"""Step requests in few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adaptive_verification.contract import NO_LABEL, REJECTION, StepRequest
from adaptive_verification.contract.hidden_states import NO_STATES, RowStates, for_rows


@dataclass(frozen=True)
class RequestRow:
    """One row, with the defaults of a plain sampling request."""

    sequence_id: int
    context_length: int
    tokens: Sequence[int]
    draft_limit: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    acceptance: int = REJECTION
    wants_log_probs: bool = False
    previous_accepted: int = NO_LABEL
    model_draft_limit: int = 16
    hidden_states: RowStates = NO_STATES


def step_request(
    rows: Sequence[RequestRow],
    release: Sequence[int] = (),
    previous_cost: torch.Tensor | None = None,
    evidence_key: Sequence[int] = (),
) -> StepRequest:
    """The rows as a validated request."""

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    return StepRequest(
        sequence_id=torch.tensor([row.sequence_id for row in rows], dtype=torch.int64),
        context_length=int32([row.context_length for row in rows]),
        token_count=int32([len(row.tokens) for row in rows]),
        tokens=int32([token for row in rows for token in row.tokens]),
        draft_limit=int32([row.draft_limit for row in rows]),
        model_draft_limit=int32([row.model_draft_limit for row in rows]),
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float32),
        top_k=int32([row.top_k for row in rows]),
        seed=torch.tensor([row.seed for row in rows], dtype=torch.int64),
        acceptance=int32([row.acceptance for row in rows]),
        wants_log_probs=int32([int(row.wants_log_probs) for row in rows]),
        previous_accepted=int32([row.previous_accepted for row in rows]),
        previous_cost=torch.empty(0) if previous_cost is None else previous_cost,
        **for_rows([row.hidden_states for row in rows]),
        release=torch.tensor(list(release), dtype=torch.int64),
        evidence_key=torch.tensor(list(evidence_key), dtype=torch.int64),
    ).validate()

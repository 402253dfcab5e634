"""A draft message that the tests of this folder send about."""

from __future__ import annotations

import torch
from tests.device import DEVICE

from adaptive_verification.contract import Draft, DraftCost


def draft() -> Draft:
    """Two rows with 2 and 0 drafts, whose distributions lie on the tests' device."""
    return Draft(
        drafted_count=torch.tensor([2, 0], dtype=torch.int32),
        draft_status=torch.zeros(2, dtype=torch.int32),
        draft_match_length=torch.tensor([5, 0], dtype=torch.int32),
        draft_tokens=torch.tensor([4, 5], dtype=torch.int32),
        draft_log_odds=torch.tensor([0.5, -1.0], device=DEVICE),
        draft_features=torch.arange(6.0, device=DEVICE),
        candidate_count=torch.tensor([1, 2], dtype=torch.int32),
        candidate_ids=torch.tensor([4, 5, 6], dtype=torch.int32, device=DEVICE),
        candidate_probs=torch.tensor([1.0, 0.75, 0.25], device=DEVICE),
        draft_cost=DraftCost.nothing().to_tensor(),
    )

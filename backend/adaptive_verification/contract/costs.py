"""What a step cost, as the stages measured it themselves: the layout of DRAFT_COST, ESTIMATE_COST and STEP_COST."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DraftCost(NamedTuple):
    """The drafter's part of a step. Times in milliseconds."""

    prefill_ms: float
    """Computing what the cache lacked, with the first draft of every drafting row."""
    prefill_tokens: float
    extend_ms: float
    """All further drafts, one forward for each depth."""
    drafting_rows: float
    depth: float
    """Drafts of the deepest row."""

    @classmethod
    def nothing(cls) -> DraftCost:
        """No drafting took place."""
        return cls(*[0.0] * len(cls._fields))

    def to_tensor(self) -> Tensor:
        return torch.tensor(self, dtype=torch.float32)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> DraftCost | None:
        """None where the tensor is empty: nothing was measured."""
        return cls(*tensor.tolist()) if tensor.numel() == len(cls._fields) else None


class StepCost(NamedTuple):
    """A whole step. Times in milliseconds."""

    draft: DraftCost
    estimate_ms: float
    verify_ms: float
    verify_rows: float
    verify_tokens: float
    """Tokens in the target's forward: what its cache lacked, and the admitted drafts."""
    reused_tokens: float = 0.0
    """Tokens that were not computed because another sequence had been."""

    def to_tensor(self) -> Tensor:
        return torch.tensor([*self.draft, *self[1:]], dtype=torch.float32)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> StepCost | None:
        """None where the tensor is empty: nothing was measured."""
        num_draft_fields = len(DraftCost._fields)
        if tensor.numel() != num_draft_fields + len(cls._fields) - 1:
            return None
        values = tensor.tolist()
        return cls(DraftCost(*values[:num_draft_fields]), *values[num_draft_fields:])

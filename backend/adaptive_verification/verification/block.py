"""What acceptance decides about: the rows of a step that ask for tokens, with their admitted drafts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """All tensors on the logits' device."""

    admitted: Tensor  # [rows] int64
    draft_tokens: Tensor  # [rows, K] int64
    q_ids: Tensor  # [rows, K, C] int64
    q_probs: Tensor  # [rows, K, C] float64, each draft's sum to 1 (as float32 they travelled, so not before)
    temperature: Tensor  # [rows]
    top_k: Tensor  # [rows]
    top_p: Tensor  # [rows]
    seed: Tensor  # [rows] int64
    acceptance: Tensor  # [rows], REJECTION or COUPLED
    block: Tensor  # [rows] int64, the confirmed length that the drafts follow

    def select(self, rows: Tensor) -> Block:
        """These rows only."""
        return Block(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

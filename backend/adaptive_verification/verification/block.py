"""What acceptance decides about: the rows of a step that ask for tokens, with their admitted drafts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    wants_log_probs: Tensor  # [rows] bool

    def wave(self, rows: Tensor, start: int, length: int) -> Wave:
        """The positions from `start` on, `length` of them at most, of these rows. Each has at least one.

        A row has a position for every admitted draft, and one after them; so the last of K + 1 has no draft.
        """
        drafts = slice(start, start + length)
        missing = max(0, start + length - self.draft_tokens.shape[1])
        admitted = self.admitted[rows] - start
        return Wave(
            start=start,
            num_drafts=admitted.clamp(max=length),
            num_positions=(admitted + 1).clamp(max=length),
            draft_tokens=F.pad(self.draft_tokens[rows, drafts], (0, missing)),
            q_ids=F.pad(self.q_ids[rows, drafts], (0, 0, 0, missing)),
            q_probs=F.pad(self.q_probs[rows, drafts], (0, 0, 0, missing)),
            seed=self.seed[rows],
            acceptance=self.acceptance[rows],
            block=self.block[rows],
        )


@dataclass(frozen=True)
class Wave:
    """Neighbouring positions of some of a block's rows."""

    start: int  # how many positions of each row come before
    num_drafts: Tensor  # [rows] int64
    num_positions: Tensor  # [rows] int64, as many as drafts; one more where the row's last position is among them
    draft_tokens: Tensor  # [rows, length] int64
    q_ids: Tensor  # [rows, length, C] int64
    q_probs: Tensor  # [rows, length, C] float64
    seed: Tensor  # as in the block, as the next two
    acceptance: Tensor
    block: Tensor

    @property
    def length(self) -> int:
        return self.draft_tokens.shape[1]

    @property
    def first_position(self) -> Tensor:
        """`[rows]`, where each row's positions begin when those of all rows lie end to end."""
        return self.num_positions.cumsum(0) - self.num_positions

    def select(self, rows: Tensor) -> Wave:
        """These rows only."""
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        start = tensors.pop("start")
        return Wave(start, **{name: tensor[rows] for name, tensor in tensors.items()})


def positions_of(first_position: Tensor, length: int) -> Tensor:
    """`[rows, length]`: the first positions and those after them."""
    return first_position.unsqueeze(-1) + torch.arange(length, device=first_position.device)

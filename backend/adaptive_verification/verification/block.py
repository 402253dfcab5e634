"""What acceptance decides about: the rows of a step that ask for tokens, with their admitted drafts."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.ragged import pad


@dataclass(frozen=True)
class Block:
    """Drafts and candidates as they travel: flat, row by row.

    The first four tensors are on the host, which lays out by them; all others are on the logits' device.
    """

    sampling: Tensor  # [rows] int64, ascending: which of the step's n rows ask for tokens
    admitted: Tensor  # [n] int64
    drafted_count: Tensor  # [n] int32, at least as many as are admitted
    candidate_count: Tensor  # [drafts] int32
    draft_tokens: Tensor  # [drafts] int32
    candidate_ids: Tensor  # [candidates] int32
    candidate_probs: Tensor  # [candidates] float32, up to a factor for each draft
    temperature: Tensor  # [n] float32, as top_p
    top_k: Tensor  # [n] int32
    top_p: Tensor  # [n]
    seed: Tensor  # [n] int64
    acceptance: Tensor  # [n] int32, REJECTION or COUPLED
    block: Tensor  # [n] int32, the confirmed length that the drafts follow
    wants_log_probs: Tensor  # [n] int32, 1 or 0

    @functools.cached_property
    def padded(self) -> PaddedBlock:
        """The same, one line for each of the rows."""
        q_ids = pad(pad(self.candidate_ids, self.candidate_count), self.drafted_count)  # [n, K, C]
        q_probs = pad(pad(self.candidate_probs.to(torch.float64), self.candidate_count), self.drafted_count)
        q_probs = q_probs / q_probs.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        rows = self.sampling.to(q_ids.device)
        return PaddedBlock(
            admitted=self.admitted[self.sampling].to(q_ids.device),
            draft_tokens=pad(self.draft_tokens, self.drafted_count)[rows].to(torch.int64),
            q_ids=q_ids[rows].to(torch.int64),
            q_probs=q_probs[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows].to(torch.int64),
            top_p=self.top_p[rows],
            seed=self.seed[rows],
            acceptance=self.acceptance[rows],
            block=self.block[rows].to(torch.int64),
            wants_log_probs=self.wants_log_probs[rows] > 0,
        )


@dataclass(frozen=True)
class PaddedBlock:
    """Zeros behind each row's drafts, and behind each draft's candidates."""

    admitted: Tensor  # [rows] int64
    draft_tokens: Tensor  # [rows, K] int64
    q_ids: Tensor  # [rows, K, C] int64
    q_probs: Tensor  # [rows, K, C] float64, each draft's sum to 1
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

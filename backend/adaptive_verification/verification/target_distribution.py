"""The target's distributions at many positions, each as its request asks for it.

Positions of plain sampling (no top-k, no top-p) keep the whole vocabulary; all others are sparse
(`sampling.truncation`). Both answer the same two questions: how likely is this token, and which token follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaptive_verification.sampling.draw import draw
from adaptive_verification.sampling.truncation import Candidates, scale, truncate
from adaptive_verification.verification.rejection import residual


class TargetDistribution:
    """Distributions at m positions.

    Args:
        logits: `[m, vocab]`.
        temperature, top_k, top_p: `[m]`, see `sampling.truncation`.
    """

    def __init__(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        self._vocab_size = logits.shape[-1]
        is_plain = (temperature > 0) & (top_k == 0) & (top_p >= 1)
        is_greedy = temperature == 0
        # three groups, so that a greedy position pays for an argmax only; each with its positions
        self._plain_at = is_plain.nonzero().squeeze(-1)
        sparse_groups = [is_greedy.nonzero().squeeze(-1), (~is_plain & ~is_greedy).nonzero().squeeze(-1)]
        self._plain = scale(logits[self._plain_at], temperature[self._plain_at])
        self._plain_log_total = self._plain.logsumexp(-1)
        self._sparse = [
            (at, truncate(scale(logits[at], temperature[at]), temperature[at], top_k[at], top_p[at]))
            for at in sparse_groups
            if at.numel()
        ]
        self._num_positions = logits.shape[0]
        self._device = logits.device

    def probability_of(self, tokens: Tensor) -> Tensor:
        """`[m]` token ids, one for each position -> `[m]` float64."""
        result = torch.zeros(self._num_positions, dtype=torch.float64, device=self._device)
        if self._plain_at.numel():
            chosen = self._plain.gather(-1, tokens[self._plain_at].unsqueeze(-1)).squeeze(-1)
            result[self._plain_at] = (chosen - self._plain_log_total).to(torch.float64).exp()
        for at, candidates in self._sparse:
            result[at] = candidates.probability_of(tokens[at])
        return result

    def draw_final(self, positions: Tensor, rejected: Tensor, q: Candidates, uniforms: Tensor) -> Tensor:
        """The token that follows the accepted drafts of each row.

        Args:
            positions: `[rows]` indices of positions.
            rejected: `[rows]` bool; True: a draft was rejected there, so draw from the residual.
            q: the rejected drafts' distributions, `[rows, width]`; ignored where nothing was rejected.
            uniforms: `[rows]` float64.
        """
        q = Candidates(q.ids, torch.where(rejected.unsqueeze(-1), q.probs, 0.0))
        result = torch.zeros(len(positions), dtype=torch.int64, device=self._device)
        place = torch.full((self._num_positions,), -1, dtype=torch.int64, device=self._device)
        if self._plain_at.numel():
            rows, local = _members(positions, self._plain_at, place)
            if rows.numel():
                p = (self._plain[local] - self._plain_log_total[local].unsqueeze(-1)).exp_()
                q_dense = torch.zeros_like(p).scatter_add_(-1, q.ids[rows], q.probs[rows].to(p.dtype))
                result[rows] = draw(residual(p, q_dense), uniforms[rows])
        for at, candidates in self._sparse:
            rows, local = _members(positions, at, place)
            if rows.numel():
                ids, p = candidates.ids[local], candidates.probs[local]
                q_there = Candidates(q.ids[rows], q.probs[rows]).at(ids)
                index = draw(residual(p, q_there), uniforms[rows])
                result[rows] = ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return result


def _members(positions: Tensor, group: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `positions` belong to the group, and where in it."""
    place.fill_(-1)
    place[group] = torch.arange(len(group), device=group.device)
    local = place[positions]
    rows = (local >= 0).nonzero().squeeze(-1)
    return rows, local[rows]

"""The target's distributions at many positions, each as its request asks for it.

Positions of plain sampling (no top-k, no top-p) keep the whole vocabulary; all others are sparse
(`sampling.truncation`). Both answer the same questions: how likely is this token, and which token follows.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from adaptive_verification.sampling import gumbel
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
        is_plain = (temperature > 0) & (top_k == 0) & (top_p >= 1)
        is_greedy = temperature == 0
        # three groups, so that a greedy position pays for an argmax only; each with its positions
        self._plain_at = is_plain.nonzero().squeeze(-1)
        greedy_at, sparse_at = is_greedy.nonzero().squeeze(-1), (~is_plain & ~is_greedy).nonzero().squeeze(-1)
        self._plain = scale(logits[self._plain_at], temperature[self._plain_at])
        self._sparse: list[tuple[Tensor, Candidates]] = []
        if greedy_at.numel():
            best = (logits if greedy_at.numel() == logits.shape[0] else logits[greedy_at]).argmax(-1, keepdim=True)
            self._sparse.append((greedy_at, Candidates(best, torch.ones_like(best, dtype=torch.float64))))
        if sparse_at.numel():
            scaled = scale(logits[sparse_at], temperature[sparse_at])
            kept = truncate(scaled, temperature[sparse_at], top_k[sparse_at], top_p[sparse_at])
            self._sparse.append((sparse_at, kept))
        self._num_positions = logits.shape[0]
        self._device = logits.device

    @cached_property
    def _plain_log_total(self) -> Tensor:
        return self._plain.logsumexp(-1)

    def probability_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """How likely a token is at a position.

        Args:
            positions: `[n]` indices of positions, each at most once.
            tokens: `[n]` token ids.

        Returns:
            `[n]` float64.
        """
        result = torch.zeros(len(positions), dtype=torch.float64, device=self._device)
        rows, local = self._members(positions, self._plain_at)
        if rows.numel():
            chosen = self._plain[local, tokens[rows]]
            result[rows] = (chosen - self._plain_log_total[local]).to(torch.float64).exp()
        for at, candidates in self._sparse:
            rows, local = self._members(positions, at)
            there = Candidates(candidates.ids[local], candidates.probs[local])
            result[rows] = there.probability_of(tokens[rows])
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
        rows, local = self._members(positions, self._plain_at)
        if rows.numel():
            p = (self._plain[local] - self._plain_log_total[local].unsqueeze(-1)).exp_()
            q_dense = torch.zeros_like(p).scatter_add_(-1, q.ids[rows], q.probs[rows].to(p.dtype))
            result[rows] = draw(residual(p, q_dense), uniforms[rows])
        for at, candidates in self._sparse:
            rows, local = self._members(positions, at)
            if rows.numel():
                ids, p = candidates.ids[local], candidates.probs[local]
                q_there = Candidates(q.ids[rows], q.probs[rows]).at(ids)
                index = draw(residual(p, q_there), uniforms[rows])
                result[rows] = ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return result

    def best_with_noise(self, positions: Tensor, seed: Tensor, place: Tensor) -> Tensor:
        """The token with the largest log p + noise at each position: distributed by p, and a function of the key.

        Args:
            positions: `[n]` indices of positions, ascending.
            seed: `[n]` int64.
            place: `[n]` int64, the position in its sequence of the token sought.

        Returns:
            `[n]` int64 token ids.
        """
        result = torch.zeros(len(positions), dtype=torch.int64, device=self._device)
        rows, local = self._members(positions, self._plain_at)
        if rows.numel():
            # all of them need no copy
            scaled = self._plain if len(local) == len(self._plain) else self._plain[local]
            result[rows] = gumbel.best_token(scaled, seed[rows], place[rows])
        for at, candidates in self._sparse:
            rows, local = self._members(positions, at)
            if rows.numel():
                there = Candidates(candidates.ids[local], candidates.probs[local])
                index = gumbel.best_candidate(there, seed[rows], place[rows])
                result[rows] = there.ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return result

    def _members(self, positions: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `positions` belong to the group, and where in it."""
        place = torch.full((self._num_positions,), -1, dtype=torch.int64, device=self._device)
        place[group] = torch.arange(len(group), device=self._device)
        local = place[positions]
        rows = (local >= 0).nonzero().squeeze(-1)
        return rows, local[rows]

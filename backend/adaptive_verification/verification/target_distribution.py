"""The target's distributions at many positions, each as its request asks for it.

Positions whose support is wide (plain sampling, or a nucleus of many tokens) keep the whole vocabulary, all others are
sparse (`sampling.truncation`). Both answer the same questions: how likely is this token, and which token follows.
Which of the two a position is follows from its own logits and settings, so nothing depends on the batch.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from adaptive_verification.ragged import select
from adaptive_verification.sampling import gumbel
from adaptive_verification.sampling.draw import draw
from adaptive_verification.sampling.largest import first_largest
from adaptive_verification.sampling.truncation import Candidates, Truncation, scale
from adaptive_verification.verification.rejection import residual, residual_of_sparse


class TargetDistribution:
    """Distributions at m positions.

    Args:
        logits: `[m, vocab]`.
        temperature, top_k, top_p: `[m]`, see `sampling.truncation`.
    """

    def __init__(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        self._logits = logits
        self._log_normalizers = torch.full((len(logits),), torch.nan, device=logits.device)
        """Of the untransformed distributions, where it fell off."""
        is_plain = (temperature > 0) & (top_k == 0) & (top_p >= 1)
        is_greedy = temperature == 0
        self._dense: list[tuple[Tensor, _Dense]] = []
        self._sparse: list[tuple[Tensor, Candidates]] = []
        # each group with its positions; a greedy position pays for an argmax only
        plain_at, greedy_at, truncated_at = (
            which.nonzero().squeeze(-1) for which in (is_plain, is_greedy, ~is_plain & ~is_greedy)
        )
        if plain_at.numel():
            dense = _Dense(scale(select(logits, plain_at), temperature[plain_at]))
            self._dense.append((plain_at, dense))
            self._note_log_normalizers(plain_at, temperature[plain_at], dense.scaled, dense.totals.log())
        if greedy_at.numel():
            best = first_largest(select(logits, greedy_at)).unsqueeze(-1)
            self._sparse.append((greedy_at, Candidates(best, torch.ones_like(best, dtype=torch.float64))))
        if truncated_at.numel():
            self._truncate(truncated_at, logits, temperature[truncated_at], top_k[truncated_at], top_p[truncated_at])

    def _truncate(self, at: Tensor, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        scaled = scale(select(logits, at), temperature)
        truncation = Truncation(scaled, temperature, top_k, top_p)
        if truncation.log_total is not None:
            self._note_log_normalizers(at, temperature, scaled, truncation.log_total.squeeze(-1))
        narrow, is_wide = truncation.narrow()
        wide, rest = is_wide.nonzero().squeeze(-1), (~is_wide).nonzero().squeeze(-1)
        if rest.numel():
            self._sparse.append((at[rest], Candidates(narrow.ids[rest], narrow.probs[rest])))
        if wide.numel():
            self._dense.append((at[wide], _Dense(truncation.wide(wide))))

    def _note_log_normalizers(self, at: Tensor, temperature: Tensor, scaled: Tensor, log_total: Tensor) -> None:
        """At temperature 1 a logit and what became of it tell the distribution's normalizer."""
        log_normalizer = self._logits[at, 0] - scaled[:, 0] + log_total
        self._log_normalizers[at] = torch.where(temperature == 1, log_normalizer, torch.nan).to(torch.float32)

    def log_probs(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of tokens in the untransformed distributions, `[n]` float32. Arguments as below."""
        log_normalizers = self._log_normalizers[positions]
        unknown = log_normalizers.isnan().nonzero().squeeze(-1)
        if unknown.numel():
            log_normalizers[unknown] = self._logits[positions[unknown]].float().logsumexp(-1)
        return self._logits[positions, tokens].float() - log_normalizers

    def probability_of(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """How likely a token is at a position.

        Args:
            positions: `[n]` indices of positions, each at most once.
            tokens: `[n]` token ids.

        Returns:
            `[n]` float64.
        """
        result = torch.zeros(len(positions), dtype=torch.float64, device=self._logits.device)
        for at, dense in self._dense:
            rows, local = self._members(positions, at)
            chosen = dense.weights[local, tokens[rows]].to(torch.float64)
            result[rows] = chosen / dense.totals[local]
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
        result = torch.zeros(len(positions), dtype=torch.int64, device=self._logits.device)
        for at, dense in self._dense:
            rows, local = self._members(positions, at)
            if rows.numel():
                weights = dense.weights[local]  # a copy
                places = rejected[rows].nonzero().squeeze(-1)
                if places.numel():
                    there = rows[places]
                    q_there = Candidates(q.ids[there], q.probs[there] * dense.totals[local[places]].unsqueeze(-1))
                    weights[places] = residual_of_sparse(weights[places], q_there)
                result[rows] = draw(weights, uniforms[rows])
        for at, candidates in self._sparse:
            rows, local = self._members(positions, at)
            if rows.numel():
                ids, p = candidates.ids[local], candidates.probs[local]
                places = rejected[rows].nonzero().squeeze(-1)
                if places.numel():
                    there = rows[places]
                    q_there_probs = Candidates(q.ids[there], q.probs[there]).at(ids[places])
                    p[places] = residual(p[places], q_there_probs)
                index = draw(p, uniforms[rows])
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
        result = torch.zeros(len(positions), dtype=torch.int64, device=self._logits.device)
        for at, dense in self._dense:
            rows, local = self._members(positions, at)
            if rows.numel():
                result[rows] = gumbel.best_token(select(dense.scaled, local), seed[rows], place[rows])
        for at, candidates in self._sparse:
            rows, local = self._members(positions, at)
            if rows.numel():
                there = Candidates(candidates.ids[local], candidates.probs[local])
                index = gumbel.best_candidate(there, seed[rows], place[rows])
                result[rows] = there.ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return result

    def _members(self, positions: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `positions` belong to the group, and where in it."""
        place = torch.full((len(self._logits),), -1, dtype=torch.int64, device=self._logits.device)
        place[group] = torch.arange(len(group), device=self._logits.device)
        local = place[positions]
        rows = (local >= 0).nonzero().squeeze(-1)
        return rows, local[rows]


class _Dense:
    """Positions with the whole vocabulary.

    Args:
        scaled: `[n, vocab]`, log-probabilities up to a constant of each row that leaves them near 0 or below; -inf
            outside the support.
    """

    def __init__(self, scaled: Tensor) -> None:
        self.scaled = scaled

    @cached_property
    def weights(self) -> Tensor:
        """`[n, vocab]`, the probabilities up to a factor."""
        return self.scaled.exp()

    @cached_property
    def totals(self) -> Tensor:
        """`[n]` float64: that factor."""
        return self.weights.sum(-1).to(torch.float64)

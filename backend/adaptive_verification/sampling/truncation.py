"""The distribution that a request asks for: temperature, then top-k, then top-p, as sparse candidates.

The order and meaning are those of Hugging Face and vLLM: top-k keeps the k most likely tokens, top-p then the
smallest set of those whose renormalized mass reaches p (at least one token). Temperature 0 is top-k 1. The nucleus
is exact without sorting the vocabulary: the largest few are taken, and only rows whose mass they do not reach are
looked at as a whole (`nucleus`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.ragged import select
from adaptive_verification.sampling.largest import first_largest, largest
from adaptive_verification.sampling.nucleus import nucleus

NARROW_WIDTH = 128


class Candidates(NamedTuple):
    """Sparse distributions, most likely first; places beyond a row's support have probability 0."""

    ids: Tensor
    """`[rows, width]` int64."""
    probs: Tensor
    """`[rows, width]` float64, each row sums to 1."""

    def probability_of(self, tokens: Tensor) -> Tensor:
        """`[rows]` token ids -> `[rows]` probabilities, 0 outside the support."""
        return torch.where(self.ids == tokens.unsqueeze(-1), self.probs, 0.0).sum(-1)

    def at(self, other_ids: Tensor) -> Tensor:
        """The probabilities of other ids, `[rows, n]` -> `[rows, n]`, 0 outside the support."""
        matches = self.ids.unsqueeze(1) == other_ids.unsqueeze(2)  # [rows, n, width]
        return torch.where(matches, self.probs.unsqueeze(1), 0.0).sum(-1)

    def dense(self, vocab_size: int) -> Tensor:
        """`[rows, vocab_size]`."""
        nothing = self.probs.new_zeros(len(self.ids), vocab_size)
        return nothing.scatter_add_(-1, self.ids, self.probs)  # places without probability may all name the same id


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over the temperature, with the largest at 0: `[rows, vocab]`, at least float32. Temperature 0 scales by
    1."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled - scaled.amax(-1, keepdim=True)
    divisor = torch.where(temperature > 0, temperature, 1.0)
    return scaled.div_(divisor.unsqueeze(-1))


class Truncation:
    """What rows with a temperature of 0, a top-k or a top-p leave of their vocabulary.

    Args:
        scaled: `[rows, vocab]` from `scale`.
        temperature: `[rows]`; 0 keeps the most likely token alone.
        top_k: `[rows]`, 0: off.
        top_p: `[rows]` in (0, 1], 1: off.
    """

    def __init__(self, scaled: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        vocab_size = scaled.shape[-1]
        limit = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
        self._scaled = scaled
        self._limit = torch.where(temperature > 0, limit, 1)
        self._has_top_k = top_k > 0
        self._top_p = top_p.to(torch.float64)
        self._widest = int(self._limit.max()) if self._limit.numel() else 1
        # [rows, 1], where it is needed
        self.log_total = scaled.logsumexp(-1, keepdim=True) if self._widest > NARROW_WIDTH else None

    def narrow(self) -> tuple[Candidates, Tensor]:
        """The candidates of rows with at most `NARROW_WIDTH` of them, and which rows have more: `[rows]` bool."""
        scaled, limit, width = self._scaled, self._limit, min(self._widest, NARROW_WIDTH)
        if width == 1:
            ids = first_largest(scaled).unsqueeze(-1)
            values = scaled.gather(-1, ids)
        else:
            values, ids = largest(scaled, width)
        probs = _keep(values, self.log_total, limit, self._top_p)
        # rows whose k or whose mass reaches beyond the width
        is_short = self._has_top_k | (probs.sum(-1) < self._top_p.clamp(max=1 - 1e-9))
        return _normalized(ids, probs), (limit > width) & is_short

    def wide(self, rows: Tensor) -> Tensor:
        """What is left of these rows, whole: `scaled`'s values `[len(rows), vocab]`, -inf outside the support."""
        scaled, limit, top_p = self._scaled[rows], self._limit[rows], self._top_p[rows]
        with_k = (limit < scaled.shape[-1]).nonzero().squeeze(-1)
        if with_k.numel():
            values, ids = largest(scaled[with_k], int(limit[with_k].max()))
            values = values.masked_fill(
                torch.arange(values.shape[-1], device=values.device) >= limit[with_k, None], -torch.inf
            )
            scaled[with_k] = torch.full_like(scaled[with_k], -torch.inf).scatter_(-1, ids, values)
        with_p = (top_p < 1).nonzero().squeeze(-1)
        if with_p.numel():
            there = select(scaled, with_p)
            scaled[with_p] = there.masked_fill(~nucleus(there, top_p[with_p]), -torch.inf)
        return scaled


def truncate(scaled: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Candidates:
    """The truncated, renormalized distributions of rows, all as candidates. Arguments as in `Truncation`."""
    truncation = Truncation(scaled, temperature, top_k, top_p)
    kept, has_more = truncation.narrow()
    rows = has_more.nonzero().squeeze(-1)
    if rows.numel() == 0:
        return kept
    whole = truncation.wide(rows)
    values, wide_ids = largest(whole, int((whole > -torch.inf).sum(-1).max()))
    padding = (0, values.shape[-1] - kept.ids.shape[-1])
    ids, probs = F.pad(kept.ids, padding), F.pad(kept.probs, padding)
    ids[rows], probs[rows] = wide_ids, values.to(torch.float64).softmax(-1)
    return Candidates(ids, probs)


def _normalized(ids: Tensor, probs: Tensor) -> Candidates:
    return Candidates(ids, probs / probs.sum(-1, keepdim=True))


def _keep(values: Tensor, log_total: Tensor | None, limit: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities of the kept candidates, 0 for the others; relative to what top-k leaves."""
    values = values.to(torch.float64)
    rank = torch.arange(values.shape[-1], device=values.device)
    within = rank < limit.unsqueeze(-1)
    values = values.masked_fill(~within, -torch.inf)
    # a row whose limit lies within the width is normalized over its own candidates, any other over the vocabulary
    normalizer = values.logsumexp(-1, keepdim=True)
    if log_total is not None:
        complete = (limit <= values.shape[-1]).unsqueeze(-1)
        normalizer = torch.where(complete, normalizer, log_total.to(torch.float64))
    probs = (values - normalizer).exp()
    before = probs.cumsum(-1) - probs
    return torch.where(before < top_p.unsqueeze(-1), probs, 0.0)

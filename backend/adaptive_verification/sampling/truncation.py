"""The distribution that a request asks for: temperature, then top-k, then top-p, as sparse candidates.

The order and meaning are those of Hugging Face and vLLM: top-k keeps the k most likely tokens, top-p then the
smallest set of those whose renormalized mass reaches p (at least one token). Temperature 0 is top-k 1. The nucleus
is exact without sorting the vocabulary: the largest few are taken, and more only for rows whose mass they do not reach.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FIRST_WIDTH = 128
_WIDENING = 8


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


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over the temperature, with the largest at 0: `[rows, vocab]`, at least float32. Temperature 0 scales by
    1."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled - scaled.amax(-1, keepdim=True)
    divisor = torch.where(temperature > 0, temperature, 1.0)
    return scaled.div_(divisor.unsqueeze(-1))


def truncate(scaled: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Candidates:
    """The truncated, renormalized distributions of rows with a temperature of 0, a top-k or a top-p.

    Args:
        scaled: `[rows, vocab]` from `scale`.
        temperature: `[rows]`; 0 keeps the most likely token alone.
        top_k: `[rows]`, 0: off.
        top_p: `[rows]` in (0, 1], 1: off.
    """
    vocab_size = scaled.shape[-1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    limit = torch.where(temperature > 0, limit, 1)
    top_p = top_p.to(torch.float64)
    widest = int(limit.max()) if limit.numel() else 1
    width = min(widest, _FIRST_WIDTH)
    log_total = scaled.logsumexp(-1, keepdim=True) if widest > width else None

    values, ids = _largest(scaled, width)
    probs = _keep(values, log_total, limit, top_p)
    while width < widest:
        # rows whose k or whose mass reaches beyond the width
        short = (limit > width) & ((top_k > 0) | (probs.sum(-1) < top_p.clamp(max=1 - 1e-9)))
        if not bool(short.any()):
            break
        previous, width = width, min(widest, width * _WIDENING)
        wider_values, wider_ids = _largest(scaled[short], width)
        wider_probs = _keep(
            wider_values, log_total[short] if log_total is not None else None, limit[short], top_p[short]
        )
        padding = (0, width - previous)
        ids, probs = torch.nn.functional.pad(ids, padding), torch.nn.functional.pad(probs, padding)
        ids[short], probs[short] = wider_ids, wider_probs
    return Candidates(ids, probs / probs.sum(-1, keepdim=True))


def _largest(scaled: Tensor, width: int) -> tuple[Tensor, Tensor]:
    if width == 1:
        values, ids = scaled.max(-1, keepdim=True)  # of equal ones the first, like argmax
        return values, ids
    return scaled.topk(width, dim=-1, sorted=True)


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

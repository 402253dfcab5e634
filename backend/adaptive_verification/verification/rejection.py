"""Lossless acceptance by rejection (Leviathan et al. 2023, Chen et al. 2023), as two formulas used everywhere.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)). At the first rejection the token is drawn from
the residual max(0, p - q), normalized. After the last admitted draft it is drawn from p. Then each token is distributed
exactly by p. With p and q point masses (temperature 0) this is greedy acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaptive_verification.sampling.truncation import Candidates


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) of the drafted tokens, elementwise, in float64. A token that q gives 0 was not drawn from it: 0."""
    p, q = p.to(torch.float64), q.to(torch.float64)
    return torch.where(q > 0, (p / q).clamp(max=1.0), 0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Unnormalized weights of the token at a rejected draft, over any common support that contains p's. `[rows, n]`.

    Where nothing is left (p equals q, so a rejection is a rounding error) the weights are p's.
    """
    left = (p - q.to(p.dtype)).clamp_(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def residual_of_sparse(p: Tensor, q: Candidates) -> Tensor:
    """The same for p over a whole vocabulary `[rows, vocab]` and a sparse q, whose total is p's."""
    left = p.scatter_add(-1, q.ids, -q.probs.to(p.dtype))
    at_q = left.gather(-1, q.ids).clamp_(min=0.0)
    left.scatter_(-1, q.ids, at_q)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def accepted_prefix(accepted: Tensor, counts: Tensor) -> Tensor:
    """How many drafts of each row are accepted before the first rejection.

    Args:
        accepted: `[rows, K]` bool, each draft's own outcome.
        counts: `[rows]` admitted drafts; later columns are ignored.
    """
    considered = torch.arange(accepted.shape[1], device=accepted.device) < counts.unsqueeze(-1)
    return (accepted & considered).to(torch.int64).cumprod(-1).sum(-1)

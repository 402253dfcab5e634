"""One draft of each row: from the drafter's logits to candidates, the drawn token, and its evidence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adaptive_verification.estimation.features import logit_q_max
from adaptive_verification.sampling.draw import draw
from adaptive_verification.sampling.truncation import Candidates, scale, truncate


class Proposal(NamedTuple):
    """One draft for each row."""

    tokens: Tensor  # [rows] int64, drawn from q
    q: Candidates  # [rows, width]
    log_odds: Tensor  # [rows] float32, of the most likely token, over the whole vocabulary


def propose(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, draft_top_k: int, uniforms: Tensor
) -> Proposal:
    """Draws one draft of each row.

    The request's own transforms apply to q as well, because a q nearer to p is accepted more often, and at most
    `draft_top_k` candidates are kept: q is what was drawn from, so no choice of candidates biases the output.

    Args:
        logits: `[rows, vocab]`.
        temperature, top_k, top_p: `[rows]`, see `sampling.truncation`.
        uniforms: `[rows]` float64 in [0, 1).
    """
    scaled = scale(logits, temperature)
    at_most = torch.where(top_k > 0, top_k.clamp(max=draft_top_k), draft_top_k)
    q = truncate(scaled, temperature, at_most, top_p)
    q = Candidates(q.ids, q.probs.to(torch.float32).to(torch.float64))  # what travels is what is drawn from
    index = draw(q.probs, uniforms)
    tokens = q.ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return Proposal(tokens, q, logit_q_max(scaled))

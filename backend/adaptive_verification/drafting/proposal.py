"""One draft of each row: from the drafter's logits to candidates, the drawn token, and its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.estimation.features import draft_features, logit_q_max
from adaptive_verification.sampling import gumbel, noise
from adaptive_verification.sampling.draw import draw
from adaptive_verification.sampling.truncation import Candidates, scale, truncate


class Keys(NamedTuple):
    """What each row's choice is a function of, beside the distribution."""

    seed: Tensor  # [rows] int64
    block: Tensor  # [rows] int64, the confirmed length that the drafts follow
    depth: int  # drafts of the block before this one
    coupled: Tensor  # [rows] bool, whether the target will meet the same noise


class Proposal(NamedTuple):
    """One draft for each row."""

    tokens: Tensor  # [rows] int64, drawn from q
    q: Candidates  # [rows, width]
    log_odds: Tensor  # [rows] float32, of the most likely token, over the whole vocabulary
    features: Tensor | None  # [rows, 3], `DRAFT_FEATURES`, likewise; None where nobody asked for them


def propose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    draft_top_k: int,
    keys: Keys,
    token_ids: Tensor,
    with_features: bool = False,
) -> Proposal:
    """Draws one draft of each row.

    The request's own transforms apply to q as well, because a q nearer to p is accepted more often, and at most
    `draft_top_k` candidates are kept: q is what was drawn from, so no choice of candidates biases the output. A coupled
    row's q is the draft alone.

    Args:
        logits: `[rows, vocab]`.
        temperature, top_k, top_p: `[rows]`, see `sampling.truncation`.
        draft_top_k: at most `vocab`.
        token_ids: `[vocab]`, which token each logit is of.
    """
    scaled = scale(logits, temperature)
    at_most = torch.where(top_k > 0, top_k.clamp(max=draft_top_k), draft_top_k)
    places, probs = truncate(scaled, temperature, at_most, top_p)
    q = Candidates(token_ids[places], probs.to(torch.float32).to(torch.float64))  # what travels is what is drawn from
    index = _choose(q, keys)
    q = Candidates(q.ids, torch.where(keys.coupled.unsqueeze(-1), F.one_hot(index, q.probs.shape[-1]), q.probs))
    features = draft_features(scaled, _at(places, index)) if with_features else None
    return Proposal(_at(q.ids, index), q, logit_q_max(scaled), features)


def by_row(proposals: Sequence[Proposal], rows: Sequence[int]) -> Proposal:
    """The drafts of a step as one proposal, row by row; candidates are as wide as the widest.

    Args:
        proposals: one for each depth, over ever fewer of the rows.
        rows: where each of them stands in the step; ascending among those that go equally deep.
    """
    if len(proposals) == 1:
        return proposals[0]
    device = proposals[0].tokens.device
    rows_of_drafts = np.concatenate([rows[: len(proposal.tokens)] for proposal in proposals])
    order = torch.from_numpy(rows_of_drafts.argsort(kind="stable")).to(device)

    def joined(by_depth: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(by_depth))[order]

    width = max(proposal.q.ids.shape[1] for proposal in proposals)
    q = Candidates(
        *(
            joined([F.pad(part, (0, width - part.shape[1])) for part in parts])
            for parts in zip(*(proposal.q for proposal in proposals), strict=True)
        )
    )
    features = [proposal.features for proposal in proposals if proposal.features is not None]
    return Proposal(
        tokens=joined([proposal.tokens for proposal in proposals]),
        q=q,
        log_odds=joined([proposal.log_odds for proposal in proposals]),
        features=joined(features) if features else None,
    )


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`[rows, n]` and `[rows]` -> `[rows]`."""
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _choose(q: Candidates, keys: Keys) -> Tensor:
    """The place of each row's draft among its candidates. `[rows]`"""
    index = torch.zeros_like(keys.seed)
    if q.probs.shape[-1] == 1:
        return index
    drawing, coupled = (~keys.coupled).nonzero().squeeze(-1), keys.coupled.nonzero().squeeze(-1)
    if drawing.numel():
        uniforms = noise.uniform(keys.seed[drawing], keys.block[drawing], keys.depth, noise.DRAFT)
        index[drawing] = draw(q.probs[drawing], uniforms)
    if coupled.numel():
        there = Candidates(q.ids[coupled], q.probs[coupled])
        index[coupled] = gumbel.best_candidate(there, keys.seed[coupled], keys.block[coupled] + keys.depth)
    return index

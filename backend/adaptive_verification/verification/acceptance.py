"""Acceptance of a whole step: which drafts of which rows the target accepts, and the one token after them.

Each row is decided as it asks, by rejection (here; the arithmetic is in `rejection`) or by coupling (`coupled`). The
distributions are in `target_distribution`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_verification.contract import COUPLED, REJECTION
from adaptive_verification.ragged import mask
from adaptive_verification.sampling import noise
from adaptive_verification.sampling.truncation import Candidates
from adaptive_verification.verification.block import Block
from adaptive_verification.verification.coupled import decide_coupled
from adaptive_verification.verification.rejection import acceptance_probability, accepted_prefix
from adaptive_verification.verification.target_distribution import TargetDistribution


@dataclass(frozen=True)
class Accepted:
    """What the target decided."""

    accepted: Tensor  # [rows] int64, drafts accepted
    output_tokens: Tensor  # [sum(accepted + 1)] int64, end to end
    log_probs: Tensor  # [sum(accepted + 1)] float32, of the untransformed distribution


def accept(logits: Tensor, block: Block) -> Accepted:
    """Runs acceptance.

    Args:
        logits: `[sum(admitted + 1), vocab]`: for each row the position of each admitted draft, and the one after them.
    """
    num_rows, width = block.draft_tokens.shape
    positions_per_row = block.admitted + 1
    first_position = positions_per_row.cumsum(0) - positions_per_row  # [rows]
    row_of_position = torch.repeat_interleave(positions_per_row)  # [m]
    target = TargetDistribution(
        logits, block.temperature[row_of_position], block.top_k[row_of_position], block.top_p[row_of_position]
    )
    accepted = torch.zeros_like(block.admitted)  # [rows]
    tokens = block.draft_tokens.new_zeros(num_rows, width + 1)
    for method, decide in ((REJECTION, decide_by_rejection), (COUPLED, decide_coupled)):
        rows = (block.acceptance == method).nonzero().squeeze(-1)
        if rows.numel():
            accepted[rows], tokens[rows] = decide(target, block.select(rows), first_position[rows])

    is_output = mask(accepted + 1, width + 1)  # [rows, K + 1]
    output_tokens = tokens[is_output]
    positions = first_position.unsqueeze(-1) + torch.arange(width + 1, device=logits.device)
    output_logits = logits[positions[is_output]].float()
    chosen = output_logits.gather(-1, output_tokens.unsqueeze(-1)).squeeze(-1)
    return Accepted(accepted, output_tokens, chosen - output_logits.logsumexp(-1))


def decide_by_rejection(target: TargetDistribution, block: Block, first_position: Tensor) -> tuple[Tensor, Tensor]:
    """Decides about rows that accept by rejection. Arguments and result as in `coupled.decide_coupled`."""
    rows, width = block.draft_tokens.shape
    depth = torch.arange(width, device=first_position.device)
    is_draft = mask(block.admitted, width)  # [rows, K]
    positions = first_position.unsqueeze(-1) + depth
    p = torch.zeros(rows, width, dtype=torch.float64, device=first_position.device)
    p[is_draft] = target.probability_of(positions[is_draft], block.draft_tokens[is_draft])
    q = torch.where(block.q_ids == block.draft_tokens.unsqueeze(-1), block.q_probs, 0.0).sum(-1)  # [rows, K]
    coin = noise.uniform(block.seed.unsqueeze(-1), block.block.unsqueeze(-1), depth, noise.ACCEPT)
    accepted = accepted_prefix(coin < acceptance_probability(p, q), block.admitted)  # [rows]

    every_row = torch.arange(rows, device=first_position.device)
    first_rejected = accepted.clamp(max=width - 1)
    final_tokens = target.draw_final(
        positions=first_position + accepted,
        rejected=accepted < block.admitted,
        q=Candidates(block.q_ids[every_row, first_rejected], block.q_probs[every_row, first_rejected]),
        uniforms=noise.uniform(block.seed, block.block, accepted, noise.FINAL),
    )
    tokens = torch.cat([block.draft_tokens, final_tokens.unsqueeze(-1)], dim=1)
    tokens[every_row, accepted] = final_tokens
    return accepted, tokens

"""Acceptance of a whole step: which drafts of which rows the target accepts, and the one token after them.

The arithmetic of rejection is in `rejection`, the distributions in `target_distribution`; this is the block of all
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_verification.ragged import mask, pad, unpad
from adaptive_verification.sampling import noise
from adaptive_verification.sampling.truncation import Candidates
from adaptive_verification.verification.rejection import acceptance_probability, accepted_prefix
from adaptive_verification.verification.target_distribution import TargetDistribution


@dataclass(frozen=True)
class Block:
    """The rows of a step that ask for tokens, with their admitted drafts. All tensors on the logits' device."""

    admitted: Tensor  # [rows] int64
    draft_tokens: Tensor  # [rows, K] int64
    q_ids: Tensor  # [rows, K, C] int64
    q_probs: Tensor  # [rows, K, C] float64, each draft's sum to 1 (as float32 they travelled, so not before)
    temperature: Tensor  # [rows]
    top_k: Tensor  # [rows]
    top_p: Tensor  # [rows]
    seed: Tensor  # [rows] int64
    block: Tensor  # [rows] int64, the confirmed length that the drafts follow


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
    rows, width = block.draft_tokens.shape
    positions_per_row = block.admitted + 1
    first_position = positions_per_row.cumsum(0) - positions_per_row  # [rows]
    row_of_position = torch.repeat_interleave(positions_per_row)  # [m]
    target = TargetDistribution(
        logits, block.temperature[row_of_position], block.top_k[row_of_position], block.top_p[row_of_position]
    )

    # [m], the draft at each position; the place after a row's last draft is filled below
    after_last = block.draft_tokens.new_zeros(rows, 1)
    tokens = unpad(torch.cat([block.draft_tokens, after_last], dim=1), positions_per_row)
    p = pad(target.probability_of(tokens), positions_per_row, width + 1)[:, :width]  # [rows, K]
    q = torch.where(block.q_ids == block.draft_tokens.unsqueeze(-1), block.q_probs, 0.0).sum(-1)  # [rows, K]
    depth = torch.arange(width, device=logits.device)
    coin = noise.uniform(block.seed.unsqueeze(-1), block.block.unsqueeze(-1), depth, noise.ACCEPT)
    accepted = accepted_prefix(coin < acceptance_probability(p, q), block.admitted)  # [rows]

    every_row = torch.arange(rows, device=logits.device)
    first_rejected = accepted.clamp(max=width - 1)
    final_tokens = target.draw_final(
        positions=first_position + accepted,
        rejected=accepted < block.admitted,
        q=Candidates(block.q_ids[every_row, first_rejected], block.q_probs[every_row, first_rejected]),
        uniforms=noise.uniform(block.seed, block.block, accepted, noise.FINAL),
    )
    tokens[first_position + accepted] = final_tokens

    is_output = unpad(mask(accepted + 1, width + 1), positions_per_row)  # [m]
    output_tokens = tokens[is_output]
    output_logits = logits[is_output].float()
    chosen = output_logits.gather(-1, output_tokens.unsqueeze(-1)).squeeze(-1)
    return Accepted(accepted, output_tokens, chosen - output_logits.logsumexp(-1))

"""Acceptance by coupling: the target's token at a place is argmax(log p + noise), whatever was drafted there.

The drafter's is argmax(log q + noise) with the same noise (`sampling.gumbel`), so they are often the same, and as long
as they are, the target's next token is known as well. The text is therefore a function of the seed and the target
alone: no drafter, number of drafts, trimming or batch changes it. A draft is accepted a little less often than by
rejection.
"""

from __future__ import annotations

from torch import Tensor

from adaptive_verification.ragged import mask
from adaptive_verification.verification.block import Block
from adaptive_verification.verification.rejection import accepted_prefix
from adaptive_verification.verification.target_distribution import TargetDistribution


def decide_coupled(target: TargetDistribution, block: Block, first_position: Tensor) -> tuple[Tensor, Tensor]:
    """Decides about coupled rows.

    Args:
        first_position: `[rows]`, where in `target` each row's positions begin.

    Returns:
        `[rows]` accepted drafts, and `[rows, K + 1]` the output tokens, of which one more than accepted count.
    """
    num_drafts = block.draft_tokens.shape[1]
    is_position = mask(block.admitted + 1, num_drafts + 1)
    row, depth = is_position.nonzero(as_tuple=True)
    tokens = block.draft_tokens.new_zeros(is_position.shape)
    tokens[is_position] = target.best_with_noise(
        positions=first_position[row] + depth, seed=block.seed[row], place=block.block[row] + depth
    )
    accepted = accepted_prefix(tokens[:, :num_drafts] == block.draft_tokens, block.admitted)
    return accepted, tokens

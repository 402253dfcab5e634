"""Acceptance by coupling: the target's token at a place is argmax(log p + noise), whatever was drafted there.

The drafter's is argmax(log q + noise) with the same noise (`sampling.gumbel`), so they are often the same, and as long
as they are, the target's next token is known as well. The text is therefore a function of the seed and the target
alone: no drafter, number of drafts, trimming or batch changes it. A draft is accepted a little less often than by
rejection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaptive_verification.ragged import mask
from adaptive_verification.verification.block import Wave
from adaptive_verification.verification.rejection import accepted_prefix
from adaptive_verification.verification.target_distribution import TargetDistribution


def decide_coupled(target: TargetDistribution, wave: Wave, first_position: Tensor) -> tuple[Tensor, Tensor]:
    """Decides about coupled rows.

    Args:
        target: distributions at the wave's positions, and maybe others.
        first_position: `[rows]`, where in `target` each row's positions begin.

    Returns:
        `[rows]` accepted drafts, and `[rows, length]` the output tokens: those accepted, and the one after them, unless
        it is not in this wave.
    """
    is_position = mask(wave.num_positions, wave.length)
    row, depth = is_position.nonzero(as_tuple=True)
    tokens = torch.zeros_like(wave.draft_tokens)
    tokens[is_position] = target.best_with_noise(
        positions=first_position[row] + depth, seed=wave.seed[row], place=wave.block[row] + wave.start + depth
    )
    return accepted_prefix(tokens == wave.draft_tokens, wave.num_drafts), tokens

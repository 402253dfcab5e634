"""Drawing from unnormalized weights by inverting the cumulative sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index of each row, with probability proportional to its weight.

    Args:
        weights: `[rows, n]`, non-negative, each row with a positive sum.
        uniforms: `[rows]` float64 in [0, 1).

    Returns:
        `[rows]` int64. Never an index of weight 0.
    """
    num_rows, size = weights.shape
    if size <= 2 * _BLOCK:
        return _invert(weights, uniforms)[0]
    # a long row is searched in two levels: which block, then where in it; one pass over the weights
    missing = -size % _BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(num_rows, -1, _BLOCK)
    block, rest = _invert(blocks.sum(-1), uniforms)
    inside, _ = _invert(blocks[torch.arange(num_rows, device=weights.device), block], rest)
    return block * _BLOCK + inside


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The drawn index, and what is left of the uniform number inside it (uniform in [0, 1) again)."""
    cumulative = weights.to(torch.float64).cumsum(-1)
    threshold = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    index = torch.searchsorted(cumulative, threshold, right=True)  # [rows, 1]
    # rounding can push the threshold to the total: then the last index with weight
    last_positive = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    index = torch.minimum(index, last_positive)
    width = weights.gather(-1, index).to(torch.float64)
    rest = (threshold - (cumulative.gather(-1, index) - width)) / width
    return index.squeeze(-1), rest.squeeze(-1).clamp_(0.0, 1.0 - 2.0**-53)

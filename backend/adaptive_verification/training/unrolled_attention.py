"""Attention of a drafter that is trained on its own drafts, over whole sequences at once.

Pass 1 sees the target's states everywhere. In pass j the state before each token comes from pass j - 1, so the token is
the j-th draft after a confirmed prefix: it attends to pass 1 up to position t - j + 1, and to passes 2 to j at the one
position each where that draft stands ("training-time test", EAGLE-3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

ATTENTION_NAME = "adaptive_verification_unrolled"


class Unrolling:
    """Keys and values of the passes so far, by layer."""

    def __init__(self) -> None:
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """One pass of one layer: `[batch, heads, S, d]`, keys and values with `kv_heads` -> `[batch, S, heads, d]`."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        passes = self._passes.setdefault(layer, [])
        passes.append((key, value))
        if len(passes) == 1:
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
            return output.transpose(1, 2)
        depth, length = len(passes), query.shape[2]
        first_key, first_value = passes[0]
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(2 - depth)
        scores = (query @ first_key.transpose(-1, -2) * scaling).masked_fill(hidden, -torch.inf)
        drafts = [
            (_later(own_key, depth - place), _later(own_value, depth - place))
            for place, (own_key, own_value) in enumerate(passes[1:], start=2)
        ]
        own_scores = [(query * own_key).sum(-1, keepdim=True) * scaling for own_key, _ in drafts]
        weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1)
        output = weights[..., :length] @ first_value
        for place, (_, own_value) in enumerate(drafts):
            output = output + weights[..., length + place, None] * own_value
        return output.transpose(1, 2)


def _later(tensor: Tensor, by: int) -> Tensor:
    """What stood at position t - by now stands at t: `[batch, heads, S, d]`; the first ones are zero."""
    return F.pad(tensor[..., : tensor.shape[2] - by, :], (0, 0, by, 0)) if by else tensor


def _unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    unrolling: Unrolling,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return unrolling.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]


transformers.AttentionInterface.register(ATTENTION_NAME, _unrolled_attention)

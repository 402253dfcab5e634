"""Ragged values, flat with counts, to and from padded tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def mask(counts: Tensor, width: int) -> Tensor:
    """`[n]` counts -> `[n, width]` bool, True in each row's first `counts` places."""
    return torch.arange(width, device=counts.device) < counts.unsqueeze(-1)


def pad(values: Tensor, counts: Tensor, width: int | None = None) -> Tensor:
    """`[sum(counts), ...]` -> `[n, width, ...]`, zeros behind each row's values. Width: the largest count, at least
    1."""
    if width is None:
        width = max(int(counts.max()) if counts.numel() else 0, 1)
    padded = values.new_zeros(len(counts), width, *values.shape[1:])
    padded[mask(counts.to(values.device), width)] = values
    return padded


def unpad(padded: Tensor, counts: Tensor) -> Tensor:
    """The inverse of `pad`."""
    return padded[mask(counts.to(padded.device), padded.shape[1])]

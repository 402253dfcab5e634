"""Ragged values, flat with counts, as padded tensors; and parts of them."""

from __future__ import annotations

import torch
from torch import Tensor


def mask(counts: Tensor, width: int) -> Tensor:
    """`[n]` counts -> `[n, width]` bool, True in each row's first `counts` places."""
    return torch.arange(width, device=counts.device) < counts.unsqueeze(-1)


def pad(values: Tensor, counts: Tensor) -> Tensor:
    """`[sum(counts), ...]` -> `[n, largest count, ...]`, at least one wide, zeros behind each row's values."""
    width = max(int(counts.max()) if counts.numel() else 0, 1)
    padded = values.new_zeros(len(counts), width, *values.shape[1:])
    padded[mask(counts.to(values.device), width)] = values
    return padded


def select(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]` for ascending rows, without a copy where they are all."""
    return values if len(rows) == len(values) else values[rows]

"""Random numbers as a pure function of their key: no generator state, so no dependence on the batch, device or order.

The key is (seed, position, offset, purpose). In acceptance by rejection `position` is the sequence's length where a
step's block of drafts begins, so every step draws fresh numbers even for a place that an earlier step drafted and
lost; otherwise a budget that looks at the last block's scores would know something of this block's tokens. A repeated
step draws the same numbers. Coupled acceptance (`gumbel`) wants the opposite: a place of the sequence has one noise.

The mixing function is splitmix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), applied once for each word of the key.
"""

from __future__ import annotations

import torch
from torch import Tensor

DRAFT = 0
"""Which candidate the drafter draws."""
ACCEPT = 1
"""Whether the target accepts a draft."""
FINAL = 2
"""Which token follows the accepted drafts."""
TOKEN_BLOCK = 3
"""The noise of a block of token ids, see `gumbel`."""
TOKEN = 4
"""The noise of a token id within its block."""

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seed: Tensor, position: Tensor, offset: Tensor | int, purpose: int) -> Tensor:
    """Uniform in [0, 1), float64, one for each entry of the broadcast arguments (int64, any device)."""
    return shift_right(word(seed, position, offset, purpose), 11).to(torch.float64) * 2.0**-53


def word(seed: Tensor, position: Tensor, offset: Tensor | int, purpose: int) -> Tensor:
    """64 random bits as int64, likewise."""
    mixed = _mix(seed + GOLDEN)
    mixed = _mix(mixed + position.to(torch.int64) * 8 + purpose)
    return _mix(mixed + torch.as_tensor(offset, dtype=torch.int64, device=seed.device) * GOLDEN)


def shift_right(word: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's is arithmetic."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _mix(word: Tensor) -> Tensor:
    word = (word ^ shift_right(word, 30)) * MIX_1
    word = (word ^ shift_right(word, 27)) * MIX_2
    return word ^ shift_right(word, 31)

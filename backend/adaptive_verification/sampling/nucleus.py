"""The smallest set of most likely tokens that reaches a probability mass, exact, without sorting the vocabulary.

Tokens are counted into fine bins of log-probability. The bins' masses tell in which bin the mass is reached: the bins
above it are in, those below are out, and only that bin's few tokens are sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adaptive_verification.sampling.largest import largest

_BINS = 2048
_BINS_PER_NAT = 100
"""The last bin takes everything from 20 nats below the most likely token on, a mass of next to nothing."""


def nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens are in the nucleus, `[rows, vocab]` bool.

    Args:
        scaled: `[rows, vocab]` log-probabilities up to a constant, the largest of each row 0; -inf: never.
        top_p: `[rows]` float64 in (0, 1).
    """
    # [rows, vocab], the most likely tokens in 0, and what is no number in the last
    bins = (scaled * -_BINS_PER_NAT).nan_to_num_(nan=_BINS - 1).clamp_(0, _BINS - 1).to(torch.int64)
    mass = scaled.new_zeros(len(scaled), _BINS).scatter_add_(-1, bins, scaled.exp()).to(torch.float64)
    reached = mass.cumsum(-1)  # [rows, bins]
    wanted = (top_p * reached[:, -1]).unsqueeze(-1)
    # rounding must not make it more than there is
    last = torch.searchsorted(reached, wanted).clamp_(max=_BINS - 1)  # [rows, 1], the bin in which it is reached
    is_in = bins < last
    in_last = bins == last
    count = int(in_last.sum(-1).max())
    values, ids = largest(scaled.masked_fill(~in_last, -torch.inf), count)
    probs = values.exp().to(torch.float64)
    before = (reached - mass).gather(-1, last) + probs.cumsum(-1) - probs
    kept = (before < wanted) & (values > -torch.inf)
    return is_in.scatter_(-1, ids, is_in.gather(-1, ids) | kept)

"""Gumbel noise as a pure function of (seed, position, token id), and which token wins with it.

The argmax over all tokens of log p + noise is distributed by p (the Gumbel-max trick); two distributions that meet the
same noise mostly have the same argmax if they are alike.

Of a whole vocabulary only a small part of the noise is ever computed, and the argmax is exact nevertheless. Think of
exp(-noise) as arrival times: independent, exponential with rate 1. Ids are taken in blocks of 64. The first arrival of
a block is exponential with rate 64 and as likely any one of its tokens; each other token arrives an independent
exponential time later (memorylessness). The noise is drawn in this form, a block's first arrival and then the rest, so
the first arrivals alone bound what any token can reach, and few tokens can reach the best: of 49,152 some hundred.

All of it is integer arithmetic on the key and then float64, elementwise: batch and shape do not change a bit of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.sampling import noise
from adaptive_verification.sampling.truncation import Candidates

TOKENS_PER_BLOCK = 64
_PROMISING_BLOCKS = 4
_SLACK = 1e-9
"""A token is looked at if it may come so near to the best; far more than float64 can be off."""


class _First(NamedTuple):
    """The first arrival of blocks of tokens."""

    time: Tensor  # float64, above 0
    place: Tensor  # int64, which of the block's tokens it is


def gumbel(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise.

    Args:
        seed: `[rows]` int64.
        position: `[rows]` int64, how many tokens of the sequence come before this one.
        token_ids: `[rows, n]` int64.

    Returns:
        `[rows, n]` float64, finite.
    """
    return _gumbel(
        seed.unsqueeze(-1), position.unsqueeze(-1), token_ids // TOKENS_PER_BLOCK, token_ids % TOKENS_PER_BLOCK
    )


def best_candidate(candidates: Candidates, seed: Tensor, position: Tensor) -> Tensor:
    """The place of each row's winner among its candidates, `[rows]` int64; never one of probability 0."""
    num_rows, width = candidates.ids.shape
    if width == 1:
        return torch.zeros_like(seed)
    row, place = (candidates.probs > 0).nonzero(as_tuple=True)  # often far fewer than the widest row has
    ids = candidates.ids[row, place]
    of_ids = _gumbel(seed[row], position[row], ids // TOKENS_PER_BLOCK, ids % TOKENS_PER_BLOCK)
    return _winners(row, candidates.probs[row, place].log() + of_ids, place, (num_rows, width))


def best_token(scaled: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Each row's winner of the whole vocabulary.

    Args:
        scaled: `[rows, vocab]`, log-probabilities up to a constant of each row.
        seed, position: `[rows]`, see `gumbel`.

    Returns:
        `[rows]` int64 token ids.
    """
    num_rows, vocab_size = scaled.shape
    blocks = F.pad(scaled, (0, -vocab_size % TOKENS_PER_BLOCK), value=-torch.inf).view(num_rows, -1, TOKENS_PER_BLOCK)
    block_ids = torch.arange(blocks.shape[1], device=scaled.device)
    places = torch.arange(TOKENS_PER_BLOCK, device=scaled.device)
    most_noise = -_first(seed.unsqueeze(-1), position.unsqueeze(-1), block_ids).time.log()  # [rows, blocks]
    bound = blocks.amax(-1) + most_noise  # [rows, blocks]

    # what the winner reaches at least: the best of the few most promising blocks
    promising = bound.topk(min(_PROMISING_BLOCKS, len(block_ids)), sorted=False).indices.unsqueeze(-1)  # [rows, few, 1]
    noise_there = _gumbel(seed.view(-1, 1, 1), position.view(-1, 1, 1), promising, places)
    at_least = (blocks.take_along_dim(promising, 1) + noise_there).amax((1, 2)) - _SLACK  # [rows]

    # the tokens that reach it if they have the most noise of their block
    row, block = (bound >= at_least.unsqueeze(-1)).nonzero(as_tuple=True)
    may_win = blocks[row, block] + most_noise[row, block].unsqueeze(-1) >= at_least[row].unsqueeze(-1)
    which, place = may_win.nonzero(as_tuple=True)
    row, block = row[which], block[which]
    sums = blocks[row, block, place] + _gumbel(seed[row], position[row], block, place)
    return _winners(row, sums, block * TOKENS_PER_BLOCK + place, (num_rows, vocab_size))


def _winners(row: Tensor, sums: Tensor, choices: Tensor, shape: tuple[int, int]) -> Tensor:
    """The choice with the largest sum of each row, of equal ones the smallest.

    Args:
        row, sums, choices: `[n]` each, one entry for every choice that is open.
        shape: rows, and choices that there are.
    """
    num_rows, num_choices = shape
    best = sums.new_full((num_rows,), -torch.inf).scatter_reduce_(0, row, sums, "amax")
    wins = sums == best[row]
    return row.new_full((num_rows,), num_choices - 1).scatter_reduce_(0, row[wins], choices[wins], "amin")


def _gumbel(seed: Tensor, position: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """Of the token at a place of a block; all int64, broadcast."""
    first = _first(seed, position, block)
    word = noise.word(seed, position, block * TOKENS_PER_BLOCK + place, noise.TOKEN)
    later = first.time - _open_uniform(word).log()
    return -torch.where(place == first.place, first.time, later).log()


def _first(seed: Tensor, position: Tensor, block: Tensor) -> _First:
    word = noise.word(seed, position, block, noise.TOKEN_BLOCK)
    # the place is made of the word's low bits, the time of others
    return _First(_open_uniform(word).log() / -TOKENS_PER_BLOCK, word & (TOKENS_PER_BLOCK - 1))


def _open_uniform(word: Tensor) -> Tensor:
    """The upper 52 bits as a number above 0 and below 1, float64, so that its logarithm is neither 0 nor infinite."""
    return (noise.shift_right(word, 12) * 2 + 1).to(torch.float64) * 2.0**-53

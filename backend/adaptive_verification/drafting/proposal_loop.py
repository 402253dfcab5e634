"""Drafts on a CPU: each row's candidates, its draw and its log-odds in one compiled loop over its logits.

The formulas are those of `proposal`, which a GPU evaluates for all rows at once; here that took forty small operations
for every draft.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.compiled import compiled
from adaptive_verification.drafting.proposal import Keys, Proposal
from adaptive_verification.estimation.features import MAX_LOG_ODDS
from adaptive_verification.forward.host_floats import Floats, as_floats, widened_all
from adaptive_verification.sampling import loops
from adaptive_verification.sampling.noise import DRAFT
from adaptive_verification.sampling.truncation import Candidates

MOST_CANDIDATES = 128
"""They are kept in order as they are found, one by one: of more, `proposal` is faster."""


def propose_by_loop(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    draft_top_k: int,
    keys: Keys,
    token_ids: Tensor,
) -> Proposal:
    """As `proposal.propose`, for rows on a CPU that are not coupled, without `DRAFT_FEATURES`; `draft_top_k` is at most
    MOST_CANDIDATES."""
    num_rows = len(logits)
    width = draft_top_k if bool(temperature.any()) else 1
    tokens = torch.empty(num_rows, dtype=torch.int64)
    ids = torch.zeros(num_rows, width, dtype=torch.int64)
    probs = torch.zeros(num_rows, width)
    log_odds = torch.empty(num_rows)
    settings = (tensor.numpy() for tensor in (temperature, top_k, top_p, keys.seed, keys.block))
    results = (tensor.numpy() for tensor in (tokens, ids, probs, log_odds))
    _propose(keys.depth, as_floats(logits.contiguous()), token_ids.numpy(), *settings, *results)
    return Proposal(tokens, Candidates(ids, probs), log_odds, None)


def warm_up(dtype: torch.dtype) -> None:
    """Has the loop compiled for logits of this type, for which the first request would wait on a new machine."""
    zero = torch.zeros(1, dtype=torch.int64)
    top_k = torch.ones(1, dtype=torch.int32)
    keys = Keys(zero, zero, 0, zero.bool())
    propose_by_loop(torch.zeros(1, 1, dtype=dtype), torch.ones(1), top_k, torch.ones(1), 1, keys, zero)


@compiled(parallel=True)
def _propose(
    depth: int,
    logits: Floats,
    token_ids: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    seed: NDArray[np.int64],
    block: NDArray[np.int64],
    tokens: NDArray[np.int64],
    ids: NDArray[np.int64],
    probs: NDArray[np.float32],
    log_odds: NDArray[np.float32],
) -> None:
    for row in numba.prange(len(logits)):
        numbers = widened_all(logits[row], np.empty(logits.shape[1], np.float32))
        weights = np.empty(len(numbers), numbers.dtype)
        divisor = temperature[row] if temperature[row] > 0 else 1.0
        best = loops.most_likely(numbers)
        loops.exponentials(numbers, numbers[best], divisor, weights)
        log_odds[row] = _log_odds(weights, best)
        places = np.empty(ids.shape[1], np.int64)
        if temperature[row] == 0:
            places[0], probs[row, 0], place = best, 1.0, 0
            count = 1
        else:
            limit = min(top_k[row], len(places)) if top_k[row] > 0 else len(places)
            count = _find_largest(weights, limit, places)
            count = _keep(weights, places, count, top_p[row], probs[row])
            kept = probs[row, :count]
            place = loops.draw_weighted(
                kept, loops.sum_of(kept, 0, count), loops.uniform(seed[row], block[row], depth, DRAFT)
            )
        for candidate in range(count):
            ids[row, candidate] = token_ids[places[candidate]]
        tokens[row] = ids[row, place]


@compiled
def _log_odds(weights: NDArray[Any], token: int) -> float:
    """Of the token against all others, clamped."""
    weight = weights[token]
    weights[token] = 0
    others = loops.sum_of(weights, 0, len(weights))
    weights[token] = weight
    if others == 0:
        return MAX_LOG_ODDS
    return min(max(math.log(weight / others), -MAX_LOG_ODDS), MAX_LOG_ODDS)


@compiled
def _find_largest(weights: NDArray[Any], limit: int, places: NDArray[np.int64]) -> int:
    """The places of the largest weights above 0, the largest first and of equal ones the first; returns how many."""
    count, enough = 0, 0.0
    for place in range(len(weights)):
        weight = weights[place]
        if weight <= enough:
            continue
        count = min(count + 1, limit)
        slot = count - 1
        while slot > 0 and weights[places[slot - 1]] < weight:
            places[slot] = places[slot - 1]
            slot -= 1
        places[slot] = place
        if count == limit:
            enough = weights[places[limit - 1]]
    return count


@compiled
def _keep(
    weights: NDArray[Any], places: NDArray[np.int64], count: int, top_p: float, probs: NDArray[np.float32]
) -> int:
    """Keeps the first of the places whose mass reaches top-p, and writes their probabilities; returns how many."""
    total = 0.0
    for candidate in range(count):
        total += weights[places[candidate]]
    kept, mass = 0, 0.0
    while kept < count and (kept == 0 or mass < top_p * total):
        mass += weights[places[kept]]
        kept += 1
    for candidate in range(kept):
        probs[candidate] = weights[places[candidate]] / mass
    return kept

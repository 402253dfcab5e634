"""Acceptance by rejection on a CPU: each row's block is walked as the papers tell it, in one compiled loop.

From its first draft on, a row looks at one position of the target after the other, and only as far as it accepts. The
formulas are those of `rejection` and `sampling.truncation`, which a GPU evaluates for many positions at once; here
that took sixty operations over whole vocabularies, a tenth of a step of few rows. Weights are probabilities up to a
factor, over the whole vocabulary, 0 outside the support.
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
from adaptive_verification.contract.messages import refuse_unknown_tokens
from adaptive_verification.forward.host_floats import Floats, as_floats, widened_all
from adaptive_verification.sampling import loops
from adaptive_verification.sampling.noise import ACCEPT, FINAL
from adaptive_verification.verification.block import Block

_EDGE_STEP, _LOWEST_EDGE = 2.0**-7, 1e-12
"""How far the edge of the support is lowered at a time, and from where on to 0."""


def walk(
    logits: Tensor,
    block: Block,
    first_position: Tensor,
    places: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    """Decides about some of a block's sampling rows.

    Args:
        logits: as `acceptance.accept` takes them, on a CPU.
        first_position: `[rows]` int64, the place in the logits where a sampling row's positions begin.
        places: `[m]` int64, which of the sampling rows to decide about.
        accepted, tokens, log_probs: `[rows]` int64, `[rows, K + 1]` int64 and float32: receive the drafts accepted,
            the output tokens and, where they are wanted, their log-probabilities.

    Raises:
        ContractError: a candidate is no token of the target's; compiled code would not notice.
    """
    refuse_unknown_tokens("CANDIDATE_IDS", block.candidate_ids, logits.shape[1])
    tensors = (
        *(first_position, block.sampling, places),
        *(block.admitted, block.drafted_count, block.draft_tokens),
        *(block.candidate_count, block.candidate_ids, block.candidate_probs),
        *(block.temperature, block.top_k, block.top_p, block.seed, block.block, block.wants_log_probs),
        *(accepted, tokens, log_probs),
    )
    _walk(as_floats(logits), *(tensor.numpy() for tensor in tensors))


def warm_up(dtype: torch.dtype) -> None:
    """Has the walk compiled for logits of this type, for which the first request would wait on a new machine."""
    zero, count = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    block = Block(
        sampling=zero,
        admitted=zero,
        drafted_count=count,
        draft_tokens=count,
        candidate_count=count,
        candidate_ids=count,
        candidate_probs=torch.ones(1),
        temperature=torch.ones(1),
        top_k=count,
        top_p=torch.ones(1),
        seed=zero,
        acceptance=count,
        block=count,
        wants_log_probs=count,
    )
    accepted, tokens = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    walk(torch.zeros(1, 2, dtype=dtype), block, zero, zero, accepted, tokens, torch.zeros(1, 2))


@compiled(parallel=True)
def _walk(
    logits: Floats,
    first_position: NDArray[np.int64],
    sampling: NDArray[np.int64],
    places: NDArray[np.int64],
    admitted: NDArray[np.int64],
    drafted_count: NDArray[np.int32],
    draft_tokens: NDArray[np.int32],
    candidate_count: NDArray[np.int32],
    candidate_ids: NDArray[np.int32],
    candidate_probs: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    seed: NDArray[np.int64],
    block: NDArray[np.int32],
    wants_log_probs: NDArray[np.int32],
    accepted: NDArray[np.int64],
    tokens: NDArray[np.int64],
    log_probs: NDArray[np.float32],
) -> None:
    first_draft, first_candidate = _starts(drafted_count), _starts(candidate_count)
    for i in numba.prange(len(places)):
        place, row = places[i], sampling[places[i]]
        room = np.empty(logits.shape[1], np.float32)
        for depth in range(admitted[row] + 1):
            position = widened_all(logits[first_position[place] + depth], room)
            draft = first_draft[row] + depth
            is_accepted = False
            if temperature[row] == 0:
                token = loops.most_likely(position)
                is_accepted = depth < admitted[row] and draft_tokens[draft] == token
            else:
                weights = np.empty(len(position), position.dtype)
                total = _weigh(position, temperature[row], top_k[row], top_p[row], weights)
                token = 0
                if depth < admitted[row]:
                    token = int(draft_tokens[draft])
                    candidates = slice(first_candidate[draft], first_candidate[draft] + candidate_count[draft])
                    q_ids, q_weights = candidate_ids[candidates], candidate_probs[candidates]
                    q_total, q = 0.0, 0.0
                    for candidate in range(len(q_ids)):
                        q_total += q_weights[candidate]
                        q += q_weights[candidate] if q_ids[candidate] == token else 0.0
                    coin = loops.uniform(seed[row], block[row], depth, ACCEPT)
                    is_accepted = q > 0 and _accepts(weights[token] / total, q / q_total, coin)
                    if not is_accepted:
                        total = _leave_residual(weights, total, q_ids, q_weights, q_total)
                if not is_accepted:
                    token = loops.draw_weighted(weights, total, loops.uniform(seed[row], block[row], depth, FINAL))
            tokens[place, depth] = token
            if wants_log_probs[row]:
                log_probs[place, depth] = position[token] - _log_total(position)
            if not is_accepted:
                break
            accepted[place] += 1


@compiled
def _starts(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where each of runs begins that lie end to end."""
    starts = np.zeros(len(counts), np.int64)
    for i in range(1, len(counts)):
        starts[i] = starts[i - 1] + counts[i - 1]
    return starts


@compiled
def _accepts(p: float, q: float, coin: float) -> bool:
    """With probability min(1, p / q); q is above 0."""
    return coin < p / q


@compiled
def _weigh(logits: NDArray[Any], temperature: float, top_k: int, top_p: float, weights: NDArray[Any]) -> float:
    """Fills in the weights, of which the largest is 1, and returns their sum."""
    loops.exponentials(logits, loops.largest_of(logits), temperature, weights)
    if 0 < top_k < len(weights):
        _keep_most_likely(weights, float(top_k), True)
    total = loops.sum_of(weights, 0, len(weights))
    if top_p < 1:
        _keep_most_likely(weights, top_p * total, False)
        total = loops.sum_of(weights, 0, len(weights))
    return total


@compiled(fastmath={"reassoc", "nsz", "contract"})
def _sum_above(weights: NDArray[Any], edge: float) -> float:
    total = 0.0
    for i in range(len(weights)):
        total += weights[i] if weights[i] > edge else 0.0
    return total


@compiled
def _number_above(weights: NDArray[Any], edge: float) -> int:
    number = 0
    for i in range(len(weights)):
        number += weights[i] > edge
    return number


@compiled
def _keep_most_likely(weights: NDArray[Any], wanted: float, by_number: bool) -> None:
    """Leaves the smallest set of the largest weights whose sum, or number, reaches what is wanted; of equal weights
    the first tokens. No weight is above 1.

    An edge is lowered until enough is above it. The set ends between it and the one before, at a place that is found
    as by a quicksort that goes on only where the place is.
    """
    reached, upper, lower, enough = 0.0, 1.0, 1.0, False
    while lower > 0 and not enough:
        lower = lower * _EDGE_STEP if lower > _LOWEST_EDGE else 0.0
        amount = float(_number_above(weights, lower)) if by_number else _sum_above(weights, lower)
        enough = amount >= wanted
        if not enough:
            reached, upper = amount, lower
    between = np.empty(len(weights), np.int64)
    end = 0
    for token in range(len(weights)):
        if weights[token] <= lower:
            weights[token] = 0
        elif weights[token] <= upper:
            between[end] = token
            end += 1
    num_between, kept = end, 0  # the place is from `kept` to `end`
    while kept < end:
        pivot = between[(kept + end) // 2]
        between[(kept + end) // 2] = between[end - 1]
        middle, amount = kept, 0.0
        for place in range(kept, end - 1):
            token = between[place]
            if weights[token] > weights[pivot] or (weights[token] == weights[pivot] and token < pivot):
                between[place] = between[middle]
                between[middle] = token
                middle += 1
                amount += 1.0 if by_number else weights[token]
        between[end - 1] = between[middle]
        between[middle] = pivot
        if reached + amount >= wanted:
            end = middle
        else:
            reached += amount + (1.0 if by_number else weights[pivot])
            kept = middle + 1
            if reached >= wanted:
                end = kept
    for place in range(kept, num_between):
        weights[between[place]] = 0


@compiled
def _leave_residual(
    weights: NDArray[Any],
    total: float,
    q_ids: NDArray[np.int32],
    q_weights: NDArray[np.float32],
    q_total: float,
) -> float:
    """Makes p's weights those of max(0, p - q) and returns their sum. Where nothing is left of p, it stays as it is."""
    before = np.empty(len(q_ids), weights.dtype)
    for candidate in range(len(q_ids)):
        token = q_ids[candidate]
        before[candidate] = weights[token]
        q = q_weights[candidate] / q_total if q_total > 0 else 0.0
        weights[token] = max(0.0, weights[token] - q * total)
    left = loops.sum_of(weights, 0, len(weights))
    if left > 0:
        return left
    for candidate in range(len(q_ids) - 1, -1, -1):  # an id may be there twice
        weights[q_ids[candidate]] = before[candidate]
    return total


@compiled
def _log_total(logits: NDArray[Any]) -> float:
    """log(sum(exp))."""
    largest = loops.largest_of(logits)
    weights = np.empty(len(logits), np.float64)
    loops.exponentials(logits, largest, 1.0, weights)
    return largest + math.log(loops.sum_of(weights, 0, len(weights)))

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
from adaptive_verification.errors import ContractError
from adaptive_verification.sampling.noise import ACCEPT, FINAL, GOLDEN, MIX_1, MIX_2
from adaptive_verification.verification.block import Block

_EDGE_STEP, _LOWEST_EDGE = 2.0**-7, 1e-12
"""How far the edge of the support is lowered at a time, and from where on to 0."""
_DRAW_BLOCK = 256
"""Weights that are looked at together until it is clear that the drawn token is among them."""
_TO_INTEGER = 1.5 * 2.0**52
"""Added to a double, it leaves the nearest integer in its last bits."""
_UNDERFLOW = -700.0
"""exp of less is taken to be 0."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(constant % 2**64) for constant in (GOLDEN, MIX_1, MIX_2))


def walk(
    logits: Tensor,
    block: Block,
    rows: Tensor,
    first_position: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    """Decides about some rows of a block.

    Args:
        logits: as `acceptance.accept` takes them, on a CPU.
        rows: `[n]` int64.
        first_position: `[all rows]` int64, the place in the logits where a row's positions begin.
        accepted, tokens, log_probs: `[all rows]` int64, `[all rows, K + 1]` int64 and float32: receive the drafts
            accepted, the output tokens and, where they are wanted, their log-probabilities.

    Raises:
        ContractError: a draft or candidate is no token of the target's; compiled code would not notice.
    """
    for name, ids in (("DRAFT_TOKENS", block.draft_tokens.numpy()), ("CANDIDATE_IDS", block.q_ids.numpy())):
        if ids.size and not 0 <= ids.min() <= ids.max() < logits.shape[1]:
            wrong = ids[(ids < 0) | (ids >= logits.shape[1])][0]
            raise ContractError(f"{name} has {wrong}; a token id of the target is 0 to {logits.shape[1] - 1}")
    tensors = (
        *(logits.to(torch.promote_types(logits.dtype, torch.float32)), rows, first_position, block.admitted),
        *(block.draft_tokens, block.q_ids, block.q_probs, block.temperature, block.top_k, block.top_p, block.seed),
        *(block.block, block.wants_log_probs, accepted, tokens, log_probs),
    )
    _walk(*(tensor.numpy() for tensor in tensors))


def warm_up() -> None:
    """Has the walk compiled, for which the first request would wait on a new machine."""
    nothing, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    block = Block(
        admitted=nothing,
        draft_tokens=nothing[:, None],
        q_ids=nothing[:, None, None],
        q_probs=torch.zeros(1, 1, 1, dtype=torch.float64),
        temperature=one,
        top_k=nothing,
        top_p=one,
        seed=nothing,
        acceptance=nothing,
        block=nothing,
        wants_log_probs=nothing.bool(),
    )
    accepted, tokens = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    walk(torch.zeros(1, 2), block, nothing, nothing, accepted, tokens, torch.zeros(1, 2))


@compiled(parallel=True)
def _walk(
    logits: NDArray[Any],
    rows: NDArray[np.int64],
    first_position: NDArray[np.int64],
    admitted: NDArray[np.int64],
    draft_tokens: NDArray[np.int64],
    q_ids: NDArray[np.int64],
    q_probs: NDArray[np.float64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    seed: NDArray[np.int64],
    block: NDArray[np.int64],
    wants_log_probs: NDArray[np.bool_],
    accepted: NDArray[np.int64],
    tokens: NDArray[np.int64],
    log_probs: NDArray[np.float32],
) -> None:
    for i in numba.prange(len(rows)):
        row = rows[i]
        weights = np.empty(logits.shape[1], logits.dtype)
        for depth in range(admitted[row] + 1):
            position = logits[first_position[row] + depth]
            is_accepted = False
            if temperature[row] == 0:
                token = _most_likely(position)
                is_accepted = depth < admitted[row] and draft_tokens[row, depth] == token
            else:
                total = _weigh(position, temperature[row], top_k[row], top_p[row], weights)
                token = 0
                if depth < admitted[row]:
                    token = draft_tokens[row, depth]
                    q = 0.0
                    for candidate in range(q_ids.shape[2]):
                        if q_ids[row, depth, candidate] == token:
                            q += q_probs[row, depth, candidate]
                    coin = _uniform(seed[row], block[row], depth, ACCEPT)
                    is_accepted = _accepts(weights[token] / total, q, coin)
                    if not is_accepted:
                        total = _leave_residual(weights, total, q_ids[row, depth], q_probs[row, depth])
                if not is_accepted:
                    token = _draw(weights, total, _uniform(seed[row], block[row], depth, FINAL))
            tokens[row, depth] = token
            if wants_log_probs[row]:
                log_probs[row, depth] = position[token] - _log_total(position)
            if not is_accepted:
                break
            accepted[row] += 1


@compiled
def _accepts(p: float, q: float, coin: float) -> bool:
    """With probability min(1, p / q). A token that q gives 0 was not drawn from it."""
    return q > 0 and coin < p / q


@compiled(fastmath={"nnan", "nsz", "reassoc"})
def _largest(values: NDArray[Any]) -> Any:
    largest = values[0]
    for i in range(len(values)):
        largest = max(largest, values[i])
    return largest


@compiled
def _most_likely(logits: NDArray[Any]) -> int:
    """Of equal ones the first."""
    largest = _largest(logits)
    for token in range(len(logits)):
        if logits[token] == largest:
            return token
    return 0  # no logit is a number


@compiled
def _weigh(logits: NDArray[Any], temperature: float, top_k: int, top_p: float, weights: NDArray[Any]) -> float:
    """Fills in the weights, of which the largest is 1, and returns their sum."""
    _exponentials(logits, _largest(logits), temperature, weights)
    if 0 < top_k < len(weights):
        _keep_most_likely(weights, float(top_k), True)
    total = _sum(weights, 0, len(weights))
    if top_p < 1:
        _keep_most_likely(weights, top_p * total, False)
        total = _sum(weights, 0, len(weights))
    return total


@compiled(fastmath={"contract", "arcp"})
def _exponentials(logits: NDArray[Any], largest: float, temperature: float, weights: NDArray[Any]) -> None:
    """`exp((logits - largest) / temperature)`; 0 where a logit is no number.

    A power of two times the Taylor series of what is left, in double precision: that a processor computes for several
    numbers at once, and takes a tenth of the time of as many calls of `math.exp`.
    """
    for token in range(len(logits)):
        x = np.float64(logits[token] - largest) / temperature
        shifted = x * 1.4426950408889634 + _TO_INTEGER
        power = shifted - _TO_INTEGER
        r = x - power * 0.6931471803691238 - power * 1.9082149292705877e-10  # ln 2 in two parts; |r| <= ln(2) / 2
        series = 1 + r / 9 * (1 + r / 10 * (1 + r / 11 * (1 + r / 12 * (1 + r / 13))))
        series = 1 + r / 4 * (1 + r / 5 * (1 + r / 6 * (1 + r / 7 * (1 + r / 8 * series))))
        series = 1 + r * (1 + r / 2 * (1 + r / 3 * series))
        bits = np.float64(series).view(np.int64) + (np.float64(shifted).view(np.int64) << np.int64(52))
        weight = np.int64(bits).view(np.float64) if x > _UNDERFLOW else 0.0
        weights[token] = 1.0 if logits[token] == largest else weight


@compiled(fastmath={"reassoc", "nsz", "contract"})
def _sum(weights: NDArray[Any], start: int, stop: int) -> float:
    total = 0.0
    for i in range(start, stop):
        total += weights[i]
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
    weights: NDArray[Any], total: float, q_ids: NDArray[np.int64], q_probs: NDArray[np.float64]
) -> float:
    """Makes p's weights those of max(0, p - q) and returns their sum. Where nothing is left of p, it stays as it is."""
    before = np.empty(len(q_ids), weights.dtype)
    for candidate in range(len(q_ids)):
        token = q_ids[candidate]
        before[candidate] = weights[token]
        weights[token] = max(0.0, weights[token] - q_probs[candidate] * total)
    left = _sum(weights, 0, len(weights))
    if left > 0:
        return left
    for candidate in range(len(q_ids) - 1, -1, -1):  # an id may be there twice
        weights[q_ids[candidate]] = before[candidate]
    return total


@compiled
def _draw(weights: NDArray[Any], total: float, uniform: float) -> int:
    """The token where the running sum exceeds that share of the total; never one without weight."""
    wanted, reached = uniform * total, 0.0
    for start in range(0, len(weights), _DRAW_BLOCK):
        stop = min(start + _DRAW_BLOCK, len(weights))
        together = _sum(weights, start, stop)
        if reached + together <= wanted:
            reached += together
            continue
        for token in range(start, stop):
            reached += weights[token]
            if reached > wanted and weights[token] > 0:
                return token
    for token in range(len(weights) - 1, -1, -1):  # rounding: what is wanted was all there is
        if weights[token] > 0:
            return token
    return 0  # no weight is a number


@compiled
def _log_total(logits: NDArray[Any]) -> float:
    """log(sum(exp))."""
    largest = _largest(logits)
    weights = np.empty(len(logits), np.float64)
    _exponentials(logits, largest, 1.0, weights)
    return largest + math.log(_sum(weights, 0, len(weights)))


@compiled
def _uniform(seed: int, position: int, offset: int, purpose: int) -> float:
    """`sampling.noise.uniform` of one key."""
    mixed = _mix(np.uint64(seed) + _GOLDEN)
    mixed = _mix(mixed + np.uint64(position * 8 + purpose))
    mixed = _mix(mixed + np.uint64(offset) * _GOLDEN)
    return float(mixed >> np.uint64(11)) * 2.0**-53


@compiled
def _mix(word: Any) -> Any:
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))

"""What compiled loops over a row of logits have in common: weights, their sums, a draw, a uniform number.

Weights are probabilities up to a factor, one for each token, 0 outside the support. The formulas are those of
`sampling.truncation`, `sampling.draw` and `sampling.noise`, one row at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled
from adaptive_verification.sampling.noise import GOLDEN, MIX_1, MIX_2

_DRAW_BLOCK = 256
"""Weights that are looked at together until it is clear that the drawn token is among them."""
_LANES = 64
"""Numbers that are compared at a time."""
_TO_INTEGER = 1.5 * 2.0**52
"""Added to a double, it leaves the nearest integer in its last bits."""
_UNDERFLOW = -700.0
"""exp of less is taken to be 0."""
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(constant % 2**64) for constant in (GOLDEN, MIX_1, MIX_2))


@compiled
def largest_of(values: NDArray[Any]) -> Any:
    """-inf where none is a number. Lane by lane, as compilers arrange sums by themselves, but not this."""
    lanes = np.full(_LANES, -np.inf, values.dtype)
    in_lanes = len(values) - len(values) % _LANES
    for start in range(0, in_lanes, _LANES):
        block = values[start : start + _LANES]
        for lane in range(_LANES):
            lanes[lane] = block[lane] if block[lane] > lanes[lane] else lanes[lane]
    for i in range(in_lanes, len(values)):
        lanes[0] = values[i] if values[i] > lanes[0] else lanes[0]
    largest = lanes[0]
    for lane in range(1, _LANES):
        largest = max(largest, lanes[lane])
    return largest


@compiled
def most_likely(logits: NDArray[Any]) -> int:
    """Of equal ones the first."""
    largest = largest_of(logits)
    for token in range(len(logits)):
        if logits[token] == largest:
            return token
    return 0  # no logit is a number


@compiled(fastmath={"contract", "arcp"})
def exponentials(logits: NDArray[Any], largest: float, temperature: float, weights: NDArray[Any]) -> None:
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
def sum_of(weights: NDArray[Any], start: int, stop: int) -> float:
    total, part = 0.0, weights[start:stop]
    for i in range(len(part)):  # from 0 on: several numbers at a time
        total += part[i]
    return total


@compiled
def draw_weighted(weights: NDArray[Any], total: float, uniform: float) -> int:
    """The token where the running sum exceeds that share of the total; never one without weight."""
    wanted, reached = uniform * total, 0.0
    for start in range(0, len(weights), _DRAW_BLOCK):
        stop = min(start + _DRAW_BLOCK, len(weights))
        together = sum_of(weights, start, stop)
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
def uniform(seed: int, position: int, offset: int, purpose: int) -> float:
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

"""How many drafts to verify, and which: the best slots of the whole batch, as many as pay for themselves.

Pure functions of tensors, so that their losslessness can be enumerated. It rests on these rules:

1. A draft's acceptance probability depends on the tokens before it, never on the token itself (`features`).
2. `best_budget` is given what was known before the block was drafted, never the block's own probabilities: those of
   deeper drafts depend on the very tokens that are being admitted.
3. `admit` breaks ties by position, then by row, never by anything that depends on token values.

Survival never rises along a row, so the best slots always form prefixes, and walking through them in order is the same
as revealing one draft after another, deciding about each before it is seen.

Shapes: `[rows, K]` padded; a row's first `count` positions exist. Host arrays, float32 or float64: they are small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled


@compiled
def survival(acceptance: NDArray[Any]) -> NDArray[Any]:
    """Probability that a draft and all before it in its row are accepted, `[rows, K]` from acceptance `[rows, K]`.

    Factors are at most 1, so rounding cannot make it rise along a row.
    """
    survivals = np.empty_like(acceptance)
    rows, num_positions = acceptance.shape
    for row in range(rows):
        product = 1.0
        for position in range(num_positions):
            product *= min(max(acceptance[row, position], 0.0), 1.0)
            survivals[row, position] = product
    return survivals


@compiled
def admit(survivals: NDArray[Any], counts: NDArray[Any], budget: int) -> NDArray[np.int64]:
    """Admitted drafts of each row: how many of the `budget` best slots are its own (of equal ones see rule 3).

    Args:
        survivals: `[rows, K]`, never rising along a row.
        counts: `[rows]`, drafts of each row, at most K.
        budget: drafts to admit in the whole batch; more than there are admits all.

    Returns:
        `[rows]` int64, at most `counts`.
    """
    rows, num_positions = survivals.shape
    admitted = np.zeros(rows, np.int64)
    existing = _existing(survivals, counts)
    if budget >= len(existing):
        return counts.copy()
    if budget <= 0:
        return admitted
    worst = np.sort(existing)[-budget]  # of those to admit
    left = budget
    for row in range(rows):
        while admitted[row] < counts[row] and survivals[row, admitted[row]] > worst:
            admitted[row] += 1
        left -= admitted[row]
    for position in range(num_positions):
        for row in range(rows):
            if left > 0 and position < counts[row] and survivals[row, position] == worst:
                admitted[row] += 1
                left -= 1
    return admitted


@compiled
def best_budget(survivals: NDArray[Any], counts: NDArray[Any], verify_ms: NDArray[np.float64], price: float) -> int:
    """The number of drafts whose verification brings the most expected tokens beyond what its time is worth.

    `sum of the B largest survivals - price x verify_ms[B]`, largest over B; of equal ones the smallest B.

    Args:
        survivals: `[rows, K]`, **expected ones, known before the block was drafted** (rule 2).
        counts: `[rows]`, slots that this step may fill, also known before.
        verify_ms: `[1 + sum of counts]`, cost of verifying 0, 1, 2, ... drafts, up to a constant.
        price: tokens that a millisecond must bring, also known before (`time_price`).
    """
    best_first = np.sort(_existing(survivals, counts))[::-1]  # which of equal ones comes first is no matter here
    tokens, budget, best_gain = 0.0, 0, -price * verify_ms[0]
    for slot, expected in enumerate(best_first):
        tokens += expected
        gain = tokens - price * verify_ms[slot + 1]
        if gain > best_gain:
            budget, best_gain = slot + 1, gain
    return budget


@compiled
def _existing(survivals: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """The survivals of all slots that exist, row by row."""
    existing = np.empty(counts.sum(), survivals.dtype)
    filled = 0
    for row in range(len(counts)):
        for position in range(counts[row]):
            existing[filled] = survivals[row, position]
            filled += 1
    return existing

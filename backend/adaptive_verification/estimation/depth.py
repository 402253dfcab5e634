"""How deep to draft in the next step: trimming saves nothing of the drafting, so what will be trimmed is not drafted.

The same rule as the budget's, over (depth, budget): the most expected tokens beyond what their time is worth, where a
deeper draft costs one more forward of the drafter. It decides about the next step, so it cannot bias this one. Knows
survivals and costs, nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled


def best_depth(
    survivals: NDArray[Any],
    rows: float,
    verify_ms: NDArray[np.float64],
    draft_ms: Sequence[float],
    price: float,
) -> int:
    """The draft depth, the same for all rows, that brings the most expected tokens beyond what its time is worth.

    The next blocks are taken to be like those of a sample, each of which stands for `rows / M` of them. Their spread
    matters as much as their mean: the more they differ, the more there is to gain from verifying the best only.

    Args:
        survivals: `[M, K]`, a sample of blocks, never rising along a row.
        rows: rows of the step that draft so deep; may be a mean.
        verify_ms: `[M * K + 1]`, cost of verifying 0, 1, 2, ... drafts of the sample, up to a constant.
        draft_ms: `[K + 1]`, cost of drafting 0, 1, ... K deep.
        price: tokens that a millisecond must bring (`time_price`).

    Returns:
        0 to K. 0 is a normal answer; so is, of equally good depths, the smallest.
    """
    by_position = survivals.T.ravel()
    best_first = (-by_position).argsort(kind="stable")
    return int(_best_depth(by_position, best_first, len(survivals), rows, verify_ms, np.array(draft_ms), price))


@compiled
def _best_depth(
    by_position: NDArray[Any],
    best_first: NDArray[np.intp],
    sample: int,
    rows: float,
    verify_ms: NDArray[np.float64],
    draft_ms: NDArray[np.float64],
    price: float,
) -> int:
    """As `best_depth`, from survivals `[K * M]` and the places in them."""
    best, best_gain = 0, -price * (verify_ms[0] + draft_ms[0])
    for depth in range(1, len(draft_ms)):
        budget, tokens = 0, 0.0
        for place in best_first:
            if place < depth * sample:  # drafted when so deep
                budget += 1
                tokens += by_position[place] * rows / sample
                gain = tokens - price * (verify_ms[budget] + draft_ms[depth])
                if gain > best_gain:
                    best, best_gain = depth, gain
    return best

"""How deep to draft in the next step: trimming saves nothing of the drafting, so what will be trimmed is not drafted.

The same rule as the budget's, over (depth, budget): the most expected tokens per millisecond, where a deeper draft
costs one more forward of the drafter. It decides about the next step, so it cannot bias this one. Knows survivals and
costs, nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.estimation.budget import best_slots


def best_depth(
    survivals: NDArray[Any],
    rows: int,
    verify_ms: NDArray[np.float64],
    draft_ms: Sequence[float],
    other_tokens: float = 0.0,
) -> int:
    """The draft depth, the same for all rows, that gives the most expected tokens per millisecond.

    The next blocks are taken to be like those of a sample, each of which stands for `rows / M` of them. Their spread
    matters as much as their mean: the more they differ, the more there is to gain from verifying the best only.

    Args:
        survivals: `[M, K]`, a sample of blocks, never rising along a row.
        rows: rows of the step that draft so deep.
        verify_ms: `[M * K + 1]`, cost of everything but drafting when 0, 1, 2, ... drafts of the sample are verified.
        draft_ms: `[K + 1]`, cost of drafting 0, 1, ... K deep.
        other_tokens: expected of the step's other rows, which wait as long.

    Returns:
        0 to K. 0 is a normal answer; so is, of equally good depths, the smallest.
    """
    sample, deepest = survivals.shape
    slots = best_slots(survivals, None)
    drafted = slots // sample < np.arange(1, deepest + 1)[:, None]  # [K, M * K]: the best slots there when so deep
    certain = rows + other_tokens
    rates = (survivals.T.ravel()[slots] * drafted).cumsum(1)  # in place from here: expected tokens, per millisecond
    rates *= rows / sample
    rates += certain
    step_ms = verify_ms[drafted.cumsum(1)]
    step_ms += np.asarray(draft_ms[1:])[:, None]
    rates /= step_ms
    best_rates = rates.max(1, initial=0.0)  # [K], over the budget
    return int(np.concatenate([[certain / (verify_ms[0] + draft_ms[0])], best_rates]).argmax())

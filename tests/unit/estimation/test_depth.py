from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adaptive_verification.estimation.budget import survival
from adaptive_verification.estimation.depth import best_depth


def _best_by_trying(
    survivals: NDArray[Any], rows: float, verify_ms: NDArray[np.float64], draft_ms: list[float], price: float
) -> int:
    sample, deepest = survivals.shape
    best, best_gain = 0, -np.inf
    for depth in range(deepest + 1):
        values = sorted(survivals[:, :depth].ravel(), reverse=True)
        for budget in range(len(values) + 1):
            gain = sum(values[:budget]) * rows / sample - price * (verify_ms[budget] + draft_ms[depth])
            if gain > best_gain + 1e-12:
                best, best_gain = depth, gain
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_depth_is_the_best_of_all_depths_and_budgets(seed: int) -> None:
    random = np.random.default_rng(seed)
    sample, deepest, rows = int(random.integers(1, 6)), int(random.integers(1, 6)), float(random.uniform(1, 9))
    survivals = survival(random.uniform(0.2, 1.0, (sample, deepest)))
    verify_ms: NDArray[np.float64] = 20.0 + random.uniform(0, 3, sample * deepest + 1).cumsum()
    draft_ms = [0.0, *(2 + random.uniform(0, 4, deepest).cumsum())]
    price = float(random.uniform(0, 0.5))
    expected = _best_by_trying(survivals, rows, verify_ms, draft_ms, price)
    assert best_depth(survivals, rows, verify_ms, draft_ms, price) == expected


def test_costless_drafting_goes_deep_and_dear_drafting_stays_at_zero() -> None:
    survivals = survival(np.full((8, 5), 0.8))
    flat = np.full(41, 20.0)
    assert best_depth(survivals, 8, flat, [0.0] * 6, 0.4) == 5
    assert best_depth(survivals, 8, flat, [0.0, *(100.0 * depth for depth in range(1, 6))], 0.4) == 0


def test_blocks_that_differ_are_worth_drafting_where_equal_ones_of_the_same_mean_are_not() -> None:
    verify_ms, draft_ms = 20.0 + 1.0 * np.arange(9), [0.0, 1.0]
    equal = np.full((8, 1), 0.5)
    spread = np.array([[1.0]] * 4 + [[0.0]] * 4)
    assert best_depth(equal, 8, verify_ms, draft_ms, 0.4) == 1
    assert best_depth(equal, 8, verify_ms, draft_ms, 0.5) == 0
    assert best_depth(spread, 8, verify_ms, draft_ms, 0.5) == 1

"""Who explores, how often, and that it costs no more than its share."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive_verification.estimation.exploration import (
    BURST_STEPS,
    MOST_STEPS_BETWEEN,
    NEAR_TOKENS,
    UNKNOWN_BACKLOG,
    Exploration,
    ExplorationCost,
)


def _explored(
    steps: int, backlog: list[int], *, share: float, row_ms: float = 1.0, token_ms: float = 0.0
) -> list[list[int]]:
    """Rows that explore in each of so many steps of 100 ms."""
    account, waiting = Exploration(), np.array(backlog)
    cost = ExplorationCost(100.0, lambda tokens: row_ms + token_ms * tokens)
    return [account.rows(step, waiting, share, cost) for step in range(steps)]


@pytest.mark.parametrize("share", [0.0003, 0.003, 0.05])
@pytest.mark.parametrize("token_ms", [0.0, 0.1])
def test_exploration_takes_its_share_of_the_time(share: float, token_ms: float) -> None:
    backlog = [NEAR_TOKENS] * 40
    spent_ms = sum(map(len, _explored(4000, backlog, share=share, token_ms=token_ms))) * (1 + token_ms * NEAR_TOKENS)
    assert 0.9 * share < spent_ms / (4000 * 100) <= share


def test_all_near_rows_explore_in_turn_and_few_at_a_time() -> None:
    explored = _explored(200, [0] * 20, share=1.0)
    assert {len(rows) for rows in explored} == {2}  # an eighth of the rows, whatever may be spent
    assert {row for rows in explored for row in rows} == set(range(20))
    assert explored == _explored(200, [0] * 20, share=1.0)


def test_the_nearest_row_explores_where_none_is_near() -> None:
    explored = _explored(400, [300, 200, 250, UNKNOWN_BACKLOG], share=0.01, token_ms=0.01)
    assert {row for rows in explored for row in rows} == {1}


def test_what_a_row_lacks_is_paid_once_for_several_steps() -> None:
    """Nobody else drafts, so the rows' backlogs grow with every step; the explorer's begins anew."""
    account, backlog = Exploration(), np.array([500, 400])
    cost = ExplorationCost(100.0, lambda tokens: 1.0 + 0.1 * tokens)
    explored, spent_ms = [], 0.0
    for step in range(4000):
        rows = account.rows(step, backlog, 0.005, cost)
        spent_ms += sum(1.0 + 0.1 * backlog[row] for row in rows)
        backlog += 1
        backlog[rows] = 0
        explored.append(rows)
    assert {row for rows in explored for row in rows} == {1}
    runs = "".join("x" if rows else " " for rows in explored).split()
    assert len(runs) > 5
    assert min(len(run) for run in runs[:-1]) >= BURST_STEPS - 2  # a little dearer than with nothing lacking
    assert spent_ms <= 0.005 * 4000 * 100


def test_however_dear_some_row_explores_at_times() -> None:
    explored = _explored(3 * MOST_STEPS_BETWEEN, [0, 0], share=1e-9)
    assert sum(map(len, explored)) == 3


def test_without_a_share_or_rows_nobody_explores() -> None:
    assert not any(_explored(2 * MOST_STEPS_BETWEEN, [0, 0], share=0.0))
    assert not any(_explored(2 * MOST_STEPS_BETWEEN, [], share=0.1))
    assert not any(_explored(2 * MOST_STEPS_BETWEEN, [UNKNOWN_BACKLOG] * 2, share=0.1))

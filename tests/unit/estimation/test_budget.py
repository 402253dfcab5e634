from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from adaptive_verification.estimation.budget import admit, best_budget, survival


@st.composite
def batches(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Acceptance `[rows, K]`, with many ties, and counts."""
    rows, depth = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    probability = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1, width=32)
    cells = draw(st.lists(probability, min_size=rows * depth, max_size=rows * depth))
    counts = draw(st.lists(st.integers(0, depth), min_size=rows, max_size=rows))
    return np.array(cells, dtype=np.float32).reshape(rows, depth), np.array(counts, dtype=np.int64)


def _slots(survivals: NDArray[Any], counts: NDArray[Any]) -> list[tuple[int, int]]:
    """(row, position) of all slots in the order of admission, sorted by plain Python."""
    slots = [(row, position) for row in range(len(counts)) for position in range(counts[row])]
    return sorted(slots, key=lambda slot: (-survivals[slot], slot[1], slot[0]))


@given(batches(), st.integers(0, 25))
def test_the_best_slots_are_admitted_by_survival_then_position_then_row_and_form_prefixes(
    batch: tuple[NDArray[Any], NDArray[np.int64]], budget: int
) -> None:
    acceptance, counts = batch
    survivals = survival(acceptance)
    admitted = admit(survivals, counts, budget)
    chosen = set(_slots(survivals, counts)[:budget])
    assert chosen == {(row, position) for row in range(len(counts)) for position in range(admitted[row])}


@given(batches(), st.integers(0, 25), st.integers(0, 3), st.integers(0, 3), st.floats(0, 1, width=32))
def test_whether_a_draft_is_admitted_does_not_depend_on_deeper_drafts_of_its_row(
    batch: tuple[NDArray[Any], NDArray[np.int64]], budget: int, row: int, position: int, other: float
) -> None:
    acceptance, counts = batch
    if row >= len(counts) or position + 1 >= acceptance.shape[1]:
        return
    changed = acceptance.copy()
    changed[row, position + 1 :] = other  # what drawing another token at `position` can change
    before = admit(survival(acceptance), counts, budget)[row] > position
    after = admit(survival(changed), counts, budget)[row] > position
    assert before == after


def test_ties_admit_shallow_positions_of_all_rows_first() -> None:
    ones = np.ones((3, 2))
    counts = np.array([2, 2, 2])
    assert [admit(ones, counts, budget).tolist() for budget in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]


def test_ties_of_a_large_batch_are_still_taken_in_order() -> None:
    admitted = admit(np.ones((64, 7), dtype=np.float32), np.full(64, 7), 3 * 64 + 20)
    assert admitted.tolist() == [4] * 20 + [3] * 44


def test_survival_is_the_running_product_and_never_rises_in_float32() -> None:
    acceptance = np.random.default_rng(1).random((1000, 16), dtype=np.float32) ** 0.01
    survivals = survival(acceptance)
    np.testing.assert_allclose(survivals[:, 2], acceptance[:, 0] * acceptance[:, 1] * acceptance[:, 2], rtol=1e-6)
    assert (np.diff(survivals, axis=1) <= 0).all()


@given(batches(), st.floats(0, 2), st.integers(0, 2**32 - 1))
def test_the_budget_brings_the_most_beyond_what_its_time_is_worth(
    batch: tuple[NDArray[Any], NDArray[np.int64]], price: float, seed: int
) -> None:
    acceptance, counts = batch
    survivals, most = survival(acceptance.astype(np.float64)), int(counts.sum())
    verify_ms = np.random.default_rng(seed).uniform(0, 1, most + 1).cumsum()
    values = [survivals[slot] for slot in _slots(survivals, counts)]
    gains = [sum(values[:budget]) - price * verify_ms[budget] for budget in range(most + 1)]
    assert gains[best_budget(survivals, counts, verify_ms, price)] == pytest.approx(max(gains), abs=1e-12)


def test_free_verification_admits_all_and_dear_verification_nothing() -> None:
    survivals, counts = survival(np.full((4, 3), 0.5)), np.full(4, 3)
    assert best_budget(survivals, counts, np.full(13, 20.0), 0.2) == 12
    assert best_budget(survivals, counts, 1.0 + 10.0 * np.arange(13), 0.2) == 0
    assert best_budget(survivals, counts, 1.0 + 10.0 * np.arange(13), 0.0) == 12


def test_of_equal_gains_the_smaller_budget_wins() -> None:
    assert best_budget(np.ones((1, 2)), np.array([2]), np.array([1.0, 2.0, 3.0]), 1.0) == 0


def test_every_admission_of_a_small_batch_is_reached_by_some_budget_in_order() -> None:
    acceptance = np.array([[0.9, 0.8, 0.7], [0.95, 0.1, 0.99]])
    totals = [int(admit(survival(acceptance), np.array([3, 3]), budget).sum()) for budget in range(8)]
    assert totals == [0, 1, 2, 3, 4, 5, 6, 6]


def _output_distribution(p: NDArray[Any], q: NDArray[Any], deep_score: NDArray[Any], peeks: bool) -> NDArray[Any]:
    """First output token of one row with two drafts, over all draws and outcomes, by exact sums.

    p, q: `[V]`, the same at both positions. The acceptance predicted for the second draft, `deep_score` `[V]`, depends
    on the first draft's token. Verifying one draft is dear, two are cheap (a staircase).
    """
    step_ms = np.array([1.0, 1.5, 1.5])
    vocabulary = len(p)
    accept = np.minimum(1.0, p / q)
    residual = np.maximum(0.0, p - q)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    output = np.zeros(vocabulary)
    for first, second in itertools.product(range(vocabulary), repeat=2):
        block = survival(np.array([[0.4, deep_score[first]]]))
        known_before = block if peeks else survival(np.array([[0.4, 0.5]]))
        budget = best_budget(known_before, np.array([2]), step_ms, 1.0)
        admitted = admit(block, np.array([2]), budget)[0]
        probability = q[first] * q[second]
        if admitted == 0:
            output += probability * p
        else:
            output[first] += probability * accept[first]
            output += probability * (1 - accept[first]) * residual
    return output


def test_a_budget_from_before_the_block_is_lossless_and_one_from_the_block_itself_is_not() -> None:
    p, q, deep_score = np.array([0.5, 0.5]), np.array([0.2, 0.8]), np.array([0.9, 0.0])
    np.testing.assert_allclose(_output_distribution(p, q, deep_score, peeks=False), p, atol=1e-12)
    assert np.abs(_output_distribution(p, q, deep_score, peeks=True) - p).max() > 0.05

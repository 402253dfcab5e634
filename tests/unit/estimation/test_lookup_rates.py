from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from adaptive_verification.estimation.lookup_rates import (
    KEPT_PER_INTERVAL,
    MATCH_LENGTHS,
    PRIOR_ACCEPTED,
    PRIOR_REJECTED,
    LookupRates,
)

PRIOR = PRIOR_ACCEPTED / (PRIOR_ACCEPTED + PRIOR_REJECTED)


def fold(rates: LookupRates, match_length: list[int], accepted: list[list[int]], labelled: list[list[int]]) -> None:
    shape = (len(match_length), rates.predict(np.array([1])).shape[1])
    rates.fold(
        np.array(match_length, dtype=np.int64),
        np.array(accepted, dtype=np.float32).reshape(shape),
        np.array(labelled, dtype=np.float32).reshape(shape),
    )


def test_before_anything_is_known_the_prior_is_predicted() -> None:
    assert (LookupRates(3, 100).predict(np.array([1, 7, 500])) == np.float32(PRIOR)).all()


def test_a_prediction_is_the_beta_mean_of_the_labels_of_its_match_length_and_position() -> None:
    random = np.random.default_rng(1)
    rates, labels = LookupRates(4, 10_000), []
    for _ in range(50):
        match_length = random.integers(1, 40, 6)
        accepted, labelled = random.integers(0, 2, (2, 6, 4))
        fold(rates, match_length.tolist(), accepted.tolist(), labelled.tolist())
        for row, position in zip(*labelled.nonzero(), strict=True):
            labels.append((match_length[row], position, accepted[row, position]))
    for low, high in zip(MATCH_LENGTHS, [*MATCH_LENGTHS[1:], 1000], strict=True):
        for position in range(4):
            outcomes = [y for length, place, y in labels if low <= length < high and place == position]
            expected = (sum(outcomes) + PRIOR_ACCEPTED) / (len(outcomes) + PRIOR_ACCEPTED + PRIOR_REJECTED)
            for length in (low, high - 1):
                assert rates.predict(np.array([length]))[0, position] == pytest.approx(expected)


def test_counts_fade_after_each_interval_so_that_new_labels_outweigh_old_ones() -> None:
    rates = LookupRates(1, 2)
    for _ in range(2):
        fold(rates, [5] * 10, [[1]] * 10, [[1]] * 10)
    faded = 20 * KEPT_PER_INTERVAL
    assert rates.predict(np.array([5]))[0, 0] == pytest.approx((faded + 3) / (faded + 4))
    for _ in range(100):
        fold(rates, [5], [[0]], [[1]])
    assert rates.predict(np.array([5]))[0, 0] < 0.25


def test_what_is_no_longer_seen_returns_to_the_prior() -> None:
    rates = LookupRates(1, 1)
    fold(rates, [5] * 100, [[0]] * 100, [[1]] * 100)
    assert rates.predict(np.array([5]))[0, 0] < 0.1
    for _ in range(200):
        fold(rates, [], [], [])
    assert rates.predict(np.array([5]))[0, 0] == pytest.approx(PRIOR)


def test_a_restored_state_goes_on_as_the_one_that_was_kept() -> None:
    rates, restored = LookupRates(2, 3), LookupRates(2, 3)
    for number in range(8):
        if number == 4:
            restored.load_state_dict(json.loads(json.dumps(rates.state_dict())))
        for one in (rates, restored) if number >= 4 else (rates,):
            fold(one, [2 + number, 9], [[1, 0], [number % 2, 1]], [[1, 1], [1, 0]])
    assert restored.state_dict() == rates.state_dict()


@pytest.mark.parametrize(
    "damage",
    [{"counts": [[1.0]]}, {"counts": None}, {"steps": None}, {"counts": "x"}, {"negative": True}, {"too many": True}],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    rates = LookupRates(2, 3)
    fold(rates, [4], [[1, 1]], [[1, 1]])
    before = rates.state_dict()
    state = LookupRates(2, 3).state_dict()
    if "negative" in damage:
        state["counts"][0][0][0] = -1.0
    elif "too many" in damage:
        state["counts"][0][0][0] = 1.0  # accepted, and never decided
    with pytest.raises((ValueError, TypeError, KeyError)):
        rates.load_state_dict(state | damage)
    assert rates.state_dict() == before

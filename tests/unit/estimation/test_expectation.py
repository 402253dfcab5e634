from __future__ import annotations

import json

import numpy as np

from adaptive_verification.estimation.budget import survival
from adaptive_verification.estimation.expectation import SAMPLE_SIZE, Expectation


def _add(expectation: Expectation, acceptance: list[list[float]], counts: list[int]) -> None:
    block, drafted = np.array(acceptance, dtype=np.float32), np.array(counts)
    expectation.add(block, drafted, survival(expectation.whole_block(block, drafted)))


def test_before_anything_was_drafted_everything_is_expected_to_survive() -> None:
    expectation = Expectation(3)
    assert expectation.mean_survival.tolist() == [1.0, 1.0, 1.0]
    assert (expectation.recent_survival == 1).all()


def test_the_mean_follows_what_is_predicted_and_positions_not_drafted_keep_theirs() -> None:
    expectation = Expectation(3)
    for _ in range(500):
        _add(expectation, [[0.6, 0.9, 0.5], [0.8, 0.1, 0.5]], [2, 1])
    np.testing.assert_allclose(expectation.mean_acceptance, [0.7, 0.9, 1.0], atol=0.01)


def test_a_block_is_completed_by_the_mean() -> None:
    expectation = Expectation(3)
    for _ in range(500):
        _add(expectation, [[0.5, 0.25, 0.75]], [3])
    block = expectation.whole_block(np.array([[0.9, 0.1, 0.2]], np.float32), np.array([1]))
    np.testing.assert_allclose(block, [[0.9, 0.25, 0.75]], atol=0.01)


def test_steps_without_drafts_change_nothing() -> None:
    expectation = Expectation(2)
    _add(expectation, [[0.5, 0.5]], [2])
    before = (expectation.mean_acceptance.tolist(), expectation.recent_survival.tolist())
    _add(expectation, [[0.1, 0.1]], [0])
    expectation.add(np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.zeros((0, 2), np.float32))
    assert (expectation.mean_acceptance.tolist(), expectation.recent_survival.tolist()) == before


def test_the_sample_holds_recent_drafted_blocks_of_all_rows_in_turn() -> None:
    expectation = Expectation(1)
    many = 3 * SAMPLE_SIZE
    seen = set()
    for _ in range(12):
        _add(expectation, [[(row + 1) / 256] for row in range(many)], [row % 2 for row in range(many)])
        seen |= {round(float(value) * 256) - 1 for value in expectation.recent_survival[:, 0]}
    assert seen == set(range(1, many, 2))  # the odd rows drafted


def test_the_mean_survives_being_written_and_read() -> None:
    expectation, restored = Expectation(2), Expectation(2)
    _add(expectation, [[0.3, 0.6]], [2])
    restored.load_state_dict(json.loads(json.dumps(expectation.state_dict())))
    assert restored.mean_survival.tolist() == expectation.mean_survival.tolist()

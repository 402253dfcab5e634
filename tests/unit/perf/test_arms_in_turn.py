"""Arms that take turns: no lane's clock counts the others' steps, and the ratio is against the best other arm."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from perf.arms_in_turn import in_turn, measure, measure_first
from tqdm import tqdm


class FixedLane:
    """Each step gives so many tokens in so many seconds."""

    def __init__(self, tokens: int, seconds: float) -> None:
        self.away_s, self._gain, self._seconds = 0.0, tokens, seconds
        self.begin_round()

    def begin_round(self) -> None:
        self.tokens, self.drafts, self.steps, self.seconds = 0, 0, 0, 0.0

    def step(self) -> float:
        self.tokens += self._gain
        self.drafts += 1
        self.steps += 1
        self.seconds += self._seconds
        return self._seconds


def lanes() -> dict[str, Any]:
    return {"k0": FixedLane(8, 1.0), "k1": FixedLane(12, 2.0), "av": FixedLane(10, 1.0)}


def test_each_lane_is_told_what_passed_in_the_others() -> None:
    made = lanes()
    in_turn(made, 5, tqdm(disable=True))
    assert [lane.away_s for lane in made.values()] == pytest.approx([15.0, 10.0, 15.0])


def test_the_ratio_is_against_the_best_other_arm_round_by_round() -> None:
    options = argparse.Namespace(learning_steps=2, rounds=3, steps=4)
    k0, k1, av = measure(lanes(), options, "8, greedy")
    assert k0.split(" | ")[2:] == ["8.0", "1000.0", "8.00", "1.00", "1.000 (1.000-1.000)", "k0 |"]
    assert k1.split(" | ")[2:] == ["6.0", "2000.0", "12.00", "1.00", "0.750 (0.750-0.750)", "k0 |"]
    assert av.split(" | ")[2:] == ["10.0", "1000.0", "10.00", "1.00", "1.250 (1.250-1.250)", "k0 |"]


def test_the_first_tokens_are_those_of_fresh_lanes_in_every_round() -> None:
    options = argparse.Namespace(arms=["k0", "k1", "av"], rounds=2, first_tokens=20)
    made: list[dict[str, Any]] = []

    def new_lanes() -> dict[str, Any]:
        made.append(lanes())
        return made[-1]

    k0, _, av = measure_first(new_lanes, options, "8, greedy")
    assert [[lane.tokens for lane in fresh.values()] for fresh in made] == [[24, 24, 20]] * 2
    assert k0.split(" | ")[2:5] == ["8.0", "1000.0", "8.00"]
    assert av.split(" | ")[6:] == ["1.250 (1.250-1.250)", "k0 |"]

"""The order of measurement."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from perf.load_plan import ADAPTIVE_COLD, ARMS, MAX_DRAFT_TOKENS, NO_SPECULATION_COLD, Point, expected_seconds, plan

STEADY = [name for name, arm in ARMS.items() if not arm.cold]


@pytest.mark.parametrize(("arms", "repeats", "windows"), [(["k0"], 1, 1), (["k0", "k1", "av"], 3, 2), (STEADY, 2, 5)])
def test_every_point_is_planned_once(arms: list[str], repeats: int, windows: int) -> None:
    points = plan(["greedy", "sampled"], [1, 8], arms, repeats, windows)
    assert len(points) == 2 * 2 * len(arms) * repeats * windows
    assert set(Counter(points).values()) == {1}


def test_the_arms_of_one_round_follow_each_other() -> None:
    points = plan(["greedy", "sampled"], [1, 2, 4], STEADY, 3, 4)
    rounds = [list(group) for _, group in groupby(points, lambda p: (p.repeat, p.sampling, p.concurrency, p.window))]
    assert len(rounds) == 3 * 2 * 3 * 4
    assert all(sorted(point.arm for point in group) == sorted(STEADY) for group in rounds)


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_load_s_rounds_go_forwards_and_backwards_in_turn(windows: int) -> None:
    arms = ["k0", "k1", "av"]
    points = plan(["greedy"], [8], arms, 4, windows)
    rounds = [points[i : i + 3] for i in range(0, len(points), 3)]
    forwards = [[point.arm for point in group] == arms for group in rounds]
    assert forwards == [(group[0].repeat + group[0].window) % 2 == 0 for group in rounds]
    assert forwards.count(True) == len(rounds) / 2


def test_cold_arms_are_measured_once_in_a_repeat_side_by_side() -> None:
    points = plan(["greedy"], [1, 8], list(ARMS), 3, 4)
    cold = [number for number, point in enumerate(points) if ARMS[point.arm].cold]
    assert len(cold) == 2 * 2 * 3
    assert all(second == first + 1 for first, second in zip(cold[::2], cold[1::2], strict=True))
    assert {points[number].arm for number in cold} == {NO_SPECULATION_COLD, ADAPTIVE_COLD}


def test_arms_of_fixed_length_differ_by_the_request_alone() -> None:
    fixed = [arm for arm in ARMS.values() if arm.is_fixed]
    assert [arm.num_draft_tokens for arm in fixed] == list(range(MAX_DRAFT_TOKENS + 1))
    assert len({tuple(arm.estimator_settings.items()) for arm in fixed}) == 1


def test_a_longer_window_and_longer_requests_are_expected_to_take_longer() -> None:
    def seconds(arm: str, window_s: float = 10.0, max_tokens: int = 64) -> float:
        return expected_seconds(Point("greedy", 8, arm, 0, 0), window_s=window_s, max_tokens=max_tokens)

    assert seconds("av", window_s=20.0) == pytest.approx(seconds("av") + 10.0)
    assert seconds("av", max_tokens=128) > seconds("av")
    assert seconds("av-cold", window_s=20.0, max_tokens=128) == seconds("av-cold")

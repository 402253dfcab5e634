"""The order of measurement."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from perf.load_plan import ARMS, MAX_DRAFT_TOKENS, plan


@pytest.mark.parametrize(
    ("arms", "repeats"), [(["k0"], 1), (["k0", "k1", "av"], 3), (list(ARMS), 3), (["k0", "av"], 5)]
)
def test_every_point_is_planned_once(arms: list[str], repeats: int) -> None:
    points = plan(["greedy", "sampled"], [1, 8], arms, repeats)
    assert len(points) == 2 * 2 * len(arms) * repeats
    assert set(Counter(points).values()) == {1}


def test_the_arms_of_one_load_and_repeat_follow_each_other() -> None:
    points = plan(["greedy", "sampled"], [1, 2, 4], list(ARMS), 3)
    groups = [list(group) for _, group in groupby(points, lambda point: (point.repeat, point[:2]))]
    assert all(sorted(point.arm for point in group) == sorted(ARMS) for group in groups)


def test_each_repeat_begins_with_another_arm() -> None:
    points = plan(["greedy"], [1], list(ARMS), 3)
    assert len({next(point.arm for point in points if point.repeat == repeat) for repeat in range(3)}) == 3


def test_arms_of_fixed_length_differ_by_the_request_alone() -> None:
    fixed = [arm for arm in ARMS.values() if arm.is_fixed]
    assert [arm.num_draft_tokens for arm in fixed] == list(range(MAX_DRAFT_TOKENS + 1))
    assert len({tuple(arm.estimator_settings.items()) for arm in fixed}) == 1

"""Medians, ratios and tables of made measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from perf.load_plan import ARMS
from perf.load_plot import draw_pareto, draw_throughput_ratio
from perf.load_table import Cell, Spread, best_arm, cells_of, is_fixed_arm, is_other_arm, markdown, throughput_ratio
from perf.load_table import tokens_per_second as median_tokens_per_second
from tests.unit.perf.measurements import measurement


def repeats(arm: str, *tokens_per_second: float, concurrency: int = 1) -> list:
    return [measurement(arm, value, repeat=i, concurrency=concurrency) for i, value in enumerate(tokens_per_second)]


def test_a_spread_is_median_least_and_most() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert Spread.of([3.0, 1.0, 2.0]).format(1) == "2.0 (1.0-3.0)"
    assert Spread.of([4.0, 1.0]).median == 2.5
    assert Spread.of([2.0]).format(2) == "2.00"


def test_a_slow_spell_that_falls_on_both_arms_leaves_the_ratio_alone() -> None:
    cells = cells_of(repeats("av", 12.0, 6.0, 1.2) + repeats("k0", 10.0, 5.0, 1.0))
    assert throughput_ratio(cells, "greedy", 1, "av", "k0") == pytest.approx((1.2, 1.2, 1.2))


def test_a_ratio_takes_the_repeats_that_both_arms_have() -> None:
    cells = cells_of([*repeats("av", 12.0, 12.0), *repeats("k0", 10.0)])
    assert throughput_ratio(cells, "greedy", 1, "av", "k0") == pytest.approx((1.2, 1.2, 1.2))
    assert throughput_ratio(cells, "greedy", 1, "av", "k3") is None
    assert throughput_ratio(cells, "sampled", 1, "av", "k0") is None


def test_the_best_arm_has_the_highest_median_among_those_allowed() -> None:
    cells = cells_of(
        [*repeats("k1", 10, 11, 90), *repeats("k2", 12, 12, 12), *repeats("threshold", 13), *repeats("av", 20)]
    )
    assert best_arm(cells, "greedy", 1, is_fixed_arm) == "k2"
    assert best_arm(cells, "greedy", 1, is_other_arm) == "threshold"
    assert best_arm(cells, "greedy", 2, is_other_arm) is None
    assert median_tokens_per_second(cells, Cell("greedy", 1, "k1")) == 11


def test_the_table_has_loads_rising_and_arms_in_their_order() -> None:
    made = [measurement(arm, concurrency=concurrency) for arm in ("av", "k1", "k0") for concurrency in (64, 8)]
    rows = [line.split(" | ")[1:3] for line in markdown(made).splitlines() if line.endswith(" 0.600 |")]
    assert rows == [["8", "k0"], ["8", "k1"], ["8", "av"], ["64", "k0"], ["64", "k1"], ["64", "av"]]


def test_the_table_gives_drafts_and_tokens_by_sequence_and_step() -> None:
    row = markdown([measurement("k1", decoded_tokens=64, accepted_tokens=24, drafted_tokens=40, admitted_tokens=30)])
    assert row.splitlines()[-1] == "| greedy | 1 | k1 | 1 | 10.0 | 200 | 80.0 | 1.600 | 1.00 | 0.75 | 0.600 |"


def test_the_ratio_table_compares_with_the_best_other_arm_and_with_no_speculation() -> None:
    made = [*repeats("k0", 10, 10), *repeats("k3", 20, 20), *repeats("av", 22, 24), *repeats("av-cold", 11, 12)]
    assert "| greedy | 1 | k3 | 20.0 | 23.0 | 1.150 (1.100-1.200) | 2.300 (2.200-2.400) | 0.500 |" in markdown(made)


def test_a_study_without_adaptive_verification_has_a_table_too() -> None:
    assert "| k0 |" in markdown(repeats("k0", 10.0))


@pytest.mark.parametrize("arms", [["k0"], ["av"], list(ARMS)])
def test_pictures_are_drawn_of_whatever_was_measured(arms: list[str], tmp_path: Path) -> None:
    made = [measurement(arm, concurrency=concurrency) for arm in arms for concurrency in (1, 8)]
    for draw in (draw_throughput_ratio, draw_pareto):
        draw(made, tmp_path / "picture.png", "on some machine")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

"""Medians, ratios and tables of made measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from perf.load_plan import ARMS
from perf.load_plot import draw_pareto, draw_throughput_ratio
from perf.load_results import Measurement
from perf.load_table import Cell, Spread, best_arm, cells_of, is_fixed_arm, is_other_arm, markdown, throughput_ratio
from perf.load_table import tokens_per_second as median_tokens_per_second
from tests.unit.perf.measurements import measurement


def rounds(arm: str, *tokens_per_second: float, concurrency: int = 1) -> list[Measurement]:
    """Two windows of each repeat."""
    return [
        measurement(arm, value, repeat=i // 2, window=i % 2, concurrency=concurrency)
        for i, value in enumerate(tokens_per_second)
    ]


def test_a_spread_is_median_and_quartiles() -> None:
    assert Spread.of([9.0, 3.0, 1.0, 2.0, 4.0]) == (3.0, 2.0, 4.0, 5)
    assert Spread.of([9.0, 3.0, 1.0, 2.0, 4.0]).format(1) == "3.0 (2.0-4.0)"
    assert Spread.of([4.0, 1.0]).median == 2.5
    assert Spread.of([2.0]) == (2.0, 2.0, 2.0, 1)
    assert Spread.of([2.0]).format(2) == "2.00"


def test_a_slow_spell_that_falls_on_both_arms_leaves_the_ratio_alone() -> None:
    cells = cells_of(rounds("av", 12.0, 6.0, 1.2) + rounds("k0", 10.0, 5.0, 1.0))
    assert throughput_ratio(cells, "greedy", 1, "av", "k0") == pytest.approx((1.2, 1.2, 1.2, 3))


def test_a_ratio_takes_the_rounds_that_both_arms_have() -> None:
    cells = cells_of([*rounds("av", 12.0, 12.0), *rounds("k0", 10.0)])
    assert throughput_ratio(cells, "greedy", 1, "av", "k0") == pytest.approx((1.2, 1.2, 1.2, 1))
    assert throughput_ratio(cells, "greedy", 1, "av", "k3") is None
    assert throughput_ratio(cells, "sampled", 1, "av", "k0") is None


def test_the_best_arm_has_the_highest_median_among_those_allowed() -> None:
    cells = cells_of(
        [
            *rounds("k1", 10, 11, 90),
            *rounds("k2", 12, 12, 12),
            *rounds("threshold", 13),
            *rounds("av", 20),
            *rounds("k0-cold", 50),
        ]
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
    row = markdown([measurement("k1", tokens=64, accepted_tokens=24, drafted_tokens=40, admitted_tokens=30)])
    assert row.splitlines()[-1] == "| greedy | 1 | k1 | 1 | 10.0 | 150 | 80.0 | 1.600 | 1.00 | 0.75 | 0.600 |"


def test_the_ratio_table_compares_with_the_best_other_arm_and_with_no_speculation() -> None:
    made = [
        *(rounds("k0", 10, 10, 10) + rounds("k3", 20, 20, 20) + rounds("av", 22, 23, 24)),
    ]
    table = markdown(made).splitlines()
    assert "| greedy | 1 | 3 | k3 | 20.0 | 23.0 | 1.150 (1.125-1.175) | 2.300 (2.250-2.350) |" in table


def test_cold_arms_are_compared_with_each_other_whatever_else_was_measured() -> None:
    cold = rounds("k0-cold", 30, 30, 30) + rounds("av-cold", 27, 30, 33)
    for made in (cold, cold + rounds("k0", 10) + rounds("av", 11)):
        assert "| greedy | 1 | 3 | 1.000 (0.950-1.050) |" in markdown(made).splitlines()


def test_a_study_without_adaptive_verification_has_a_table_too() -> None:
    assert "| k0 |" in markdown(rounds("k0", 10.0))


@pytest.mark.parametrize("arms", [["k0"], ["av"], ["av", "av-cold"], list(ARMS)])
def test_pictures_are_drawn_of_whatever_was_measured(arms: list[str], tmp_path: Path) -> None:
    made = [measurement(arm, concurrency=concurrency) for arm in arms for concurrency in (1, 8)]
    for draw in (draw_throughput_ratio, draw_pareto):
        draw(made, tmp_path / "picture.png", "on some machine")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_cold_arms_have_no_place_in_the_pictures(tmp_path: Path) -> None:
    for draw in (draw_throughput_ratio, draw_pareto):
        draw([measurement("av-cold")], tmp_path / "picture.png", "on some machine")
        assert not (tmp_path / "picture.png").exists()

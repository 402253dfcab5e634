"""A study's folder: what an interrupted study finds again, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from perf.load_plan import plan
from perf.load_results import Measurement, ResultsDirectory
from tests.unit.perf.measurements import measurement

from adaptive_verification.errors import SetupError

STUDY = {"max_tokens": 64, "settings": {"dtype": "float32"}}


def results_of(directory: Path) -> ResultsDirectory[Measurement]:
    return ResultsDirectory(directory, STUDY, Measurement, "load.csv")


def test_measurements_are_found_again(tmp_path: Path) -> None:
    made = [measurement("k0", 12.5), measurement("av", repeat=1, window=3, sampling="sampled")]
    for one in made:
        results_of(tmp_path).add(one)
    assert results_of(tmp_path).measurements == made


def test_an_interrupted_study_goes_on_where_it_ended(tmp_path: Path) -> None:
    points = plan(["greedy"], [1, 2], ["k0", "av"], 2, 2)
    for point in points[:3]:
        results_of(tmp_path).add(measurement(**point._asdict()))
    measured = {found.point for found in results_of(tmp_path).measurements}
    assert [point for point in points if point not in measured] == points[3:]


@pytest.mark.parametrize("damage", ["sampling,concurrency\ngreedy,1\n", "sampling,unknown\ngreedy,1\n"])
def test_a_csv_that_is_not_ours_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "load.csv").write_text(damage)
    with pytest.raises(SetupError, match="cannot be read"):
        results_of(tmp_path)


def test_a_line_cut_short_is_refused(tmp_path: Path) -> None:
    results_of(tmp_path).add(measurement("k0"))
    file = tmp_path / "load.csv"
    file.write_text(file.read_text()[:-60])
    with pytest.raises(SetupError, match="cannot be read"):
        results_of(tmp_path)

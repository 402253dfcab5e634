"""A study's folder: what an interrupted study finds again, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from perf.load_plan import plan
from perf.load_results import ResultsDirectory
from tests.unit.perf.measurements import measurement

from adaptive_verification.errors import SetupError

STUDY = {"max_tokens": 64, "settings": {"dtype": "float32"}}


def test_measurements_are_found_again(tmp_path: Path) -> None:
    made = [measurement("k0", 12.5), measurement("av", repeat=1, sampling="sampled")]
    for one in made:
        ResultsDirectory(tmp_path, STUDY).add(one)
    assert ResultsDirectory(tmp_path, STUDY).measurements == made


def test_an_interrupted_study_goes_on_where_it_ended(tmp_path: Path) -> None:
    points = plan(["greedy"], [1, 2], ["k0", "av"], 2)
    for point in points[:3]:
        ResultsDirectory(tmp_path, STUDY).add(measurement(**point._asdict()))
    measured = {found.point for found in ResultsDirectory(tmp_path, STUDY).measurements}
    assert [point for point in points if point not in measured] == points[3:]


@pytest.mark.parametrize("damage", ["sampling,concurrency\ngreedy,1\n", "sampling,unknown\ngreedy,1\n"])
def test_a_csv_that_is_not_ours_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "load.csv").write_text(damage)
    with pytest.raises(SetupError, match="cannot be read"):
        ResultsDirectory(tmp_path, STUDY)


def test_a_line_cut_short_is_refused(tmp_path: Path) -> None:
    ResultsDirectory(tmp_path, STUDY).add(measurement("k0"))
    file = tmp_path / "load.csv"
    file.write_text(file.read_text()[:-60])
    with pytest.raises(SetupError, match="cannot be read"):
        ResultsDirectory(tmp_path, STUDY)

"""Tables and pictures of a made stream."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from perf.feature_plot import draw_auc_by_position, draw_reliability
from perf.feature_report import OFFLINE, ONLINE, STUDIED, Predictor, Study, markdown, write_csv
from tests.unit.perf.made_traces import made_trace


@pytest.fixture(scope="module")
def study() -> Study:
    return Study.of(made_trace(steps=150, spread=1.5))


def test_every_feature_is_judged_in_every_position_and_in_all(study: Study, tmp_path: Path) -> None:
    write_csv(study, tmp_path / "features.csv")
    with (tmp_path / "features.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["feature"] for row in rows} == set(STUDIED)
    assert len(rows) == 4 * (7 * 6 + 1)
    for predictor in study.predictions:
        own = [row for row in rows if row["feature"] == predictor.feature and row["fit"] == predictor.fit]
        labels = [int(float(row["labels"])) for row in own if row["history"] == str(predictor.history)]
        assert labels[0] == sum(labels[1:]) == len(study.labels)


def test_the_best_feature_is_the_one_that_decides(study: Study) -> None:
    aucs = {name: study.quality(Predictor(name, False, OFFLINE)).auc or 0 for name in STUDIED}
    assert aucs["logit_q_max"] == pytest.approx(aucs["entropy"], abs=1e-3)  # here one is the other, shifted
    assert aucs["logit_q_max"] > aucs["top_two_margin"] + 0.02


def test_history_helps_where_requests_differ(study: Study) -> None:
    for fit in (OFFLINE, ONLINE):
        with_it, without = (Predictor("logit_q_max", history, fit) for history in (True, False))
        difference = study.difference(with_it, without)
        assert difference is not None
        assert difference.mean + difference.half_width < 0


def test_the_tables_name_what_is_lossy_and_hold_every_feature(study: Study) -> None:
    text = markdown(study)
    assert f"{len(study.labels):,} labelled drafts" in text
    assert "| logit_q_drawn | **no** |" in text
    assert "| entropy | yes |" in text
    assert "| logit_q_max + history, warm |" in text
    for title in ("AUC", "log-loss", "ECE"):
        assert f"| {title} | 1 | 2 | 3 |" in text


def test_a_stream_too_short_to_be_warm_has_tables_too() -> None:
    assert "warm" in markdown(Study.of(made_trace(steps=12)))


def test_the_pictures_are_drawn(study: Study, tmp_path: Path) -> None:
    draw_reliability(study, tmp_path / "reliability.png", "made")
    draw_auc_by_position(study, tmp_path / "auc.png", "made")
    for name in ("reliability.png", "auc.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

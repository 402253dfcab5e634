"""A study's folder: what it belongs to, and what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from perf.study_file import StudyFile, resumable

from adaptive_verification.errors import SetupError

STUDY = {"max_tokens": 64, "settings": {"dtype": "float32"}}


def test_other_requests_are_refused_by_name_and_value(tmp_path: Path) -> None:
    StudyFile(tmp_path, STUDY).begin_run("on some machine")
    with pytest.raises(SetupError, match="max_tokens=64; this study has 32"):
        StudyFile(tmp_path, {**STUDY, "max_tokens": 32})
    with pytest.raises(SetupError, match="settings="):
        StudyFile(tmp_path, {**STUDY, "settings": {}})


def test_every_run_is_named_once(tmp_path: Path) -> None:
    for provenance in ("monday", "tuesday", "monday"):
        StudyFile(tmp_path, STUDY).begin_run(provenance)
    assert StudyFile(tmp_path, STUDY).provenance == ["monday", "tuesday"]


@pytest.mark.parametrize(
    ("raised", "said"), [(KeyboardInterrupt(), "goes on from here"), (SetupError("no such port"), "no such port")]
)
def test_a_study_ends_with_one_line(raised: BaseException, said: str) -> None:
    with pytest.raises(SystemExit, match=said), resumable():
        raise raised


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_study_in_order(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit, match="goes on from here"), resumable():
            signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

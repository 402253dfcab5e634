"""A study's folder: what it belongs to, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from perf.study_file import StudyFile

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

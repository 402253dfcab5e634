from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adaptive_verification.estimation import files
from adaptive_verification.estimation.state import FILE_NAME, LOCK_NAME, StateFile, is_in_use

FINGERPRINT = {"target": "a", "drafter": "b"}


def _load(file: StateFile) -> Mapping[str, Any] | None:
    found: list[Mapping[str, Any]] = []
    return found[0] if file.load(found.append) else None


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    StateFile(tmp_path / "made" / "here", FINGERPRINT).save({"slope": 0.1 + 0.2})
    assert _load(StateFile(tmp_path / "made" / "here", FINGERPRINT)) == {"slope": 0.1 + 0.2}


def test_nothing_saved_is_a_cold_start_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _load(StateFile(tmp_path, FINGERPRINT)) is None
    assert not caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"format": 1}', b"[" * 100_000, b"null"])
def test_a_damaged_file_is_set_aside_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert _load(StateFile(tmp_path, FINGERPRINT)) is None
    assert "set aside" in caplog.text
    assert (tmp_path / "estimator.damaged.json").read_bytes() == content
    assert not (tmp_path / FILE_NAME).exists()


def test_another_pairs_file_is_set_aside_unharmed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StateFile(tmp_path, {"target": "other"}).save({"slope": 1.0})
    with caplog.at_level(logging.WARNING):
        assert _load(StateFile(tmp_path, FINGERPRINT)) is None
    assert "other" in caplog.text
    assert json.loads((tmp_path / "estimator.foreign.json").read_text())["state"] == {"slope": 1.0}


def test_a_state_that_cannot_be_restored_is_damaged(tmp_path: Path) -> None:
    def restore(state: Mapping[str, Any]) -> None:
        raise KeyError("slope")

    file = StateFile(tmp_path, FINGERPRINT)
    file.save({})
    assert not file.load(restore)
    assert (tmp_path / "estimator.damaged.json").exists()


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(tmp_path, FINGERPRINT)
    file.save({"slope": 1.0})

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "fsync", full_disk)
        file.save({"slope": 2.0})
    assert "no space left" in caplog.text
    assert _load(file) == {"slope": 1.0}
    assert sorted(os.listdir(tmp_path)) == [FILE_NAME, LOCK_NAME]  # noqa: PTH208


def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "x.json", {"slope": float("nan")})
    assert not list(tmp_path.iterdir())


def test_closing_writes_the_last_state_after_any_earlier_one(tmp_path: Path) -> None:
    file = StateFile(tmp_path, FINGERPRINT)
    for number in range(20):
        file.save_soon({"number": number})
    file.close({"number": 20})
    assert _load(StateFile(tmp_path, FINGERPRINT)) == {"number": 20}


def test_a_directory_is_in_use_from_load_to_close(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path)
    file = StateFile(tmp_path, FINGERPRINT)
    _load(file)
    assert is_in_use(tmp_path)
    file.close({})
    assert not is_in_use(tmp_path)


def test_a_second_estimator_reads_but_does_not_write_until_the_first_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = StateFile(tmp_path, FINGERPRINT), StateFile(tmp_path, FINGERPRINT)
    first.save({"slope": 1.0})
    with caplog.at_level(logging.WARNING):
        assert _load(second) == {"slope": 1.0}
        second.save({"slope": 2.0})
    assert "in use by another server" in caplog.text
    assert json.loads((tmp_path / FILE_NAME).read_text())["state"] == {"slope": 1.0}
    first.close({"slope": 1.5})
    second.close({"slope": 2.0})
    assert json.loads((tmp_path / FILE_NAME).read_text())["state"] == {"slope": 2.0}


def test_a_file_that_another_estimator_owns_is_not_set_aside(tmp_path: Path) -> None:
    first, second = StateFile(tmp_path, FINGERPRINT), StateFile(tmp_path, {"target": "other"})
    first.save({"slope": 1.0})
    assert _load(second) is None
    assert (tmp_path / FILE_NAME).exists()
    first.close({"slope": 1.0})


def test_a_directory_that_cannot_be_locked_still_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    StateFile(tmp_path, FINGERPRINT).close({"slope": 1.0})
    assert _load(StateFile(tmp_path, FINGERPRINT)) == {"slope": 1.0}

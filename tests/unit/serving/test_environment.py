"""Environment variables: their defaults, and how many threads a stage gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptive_verification.serving import environment


def test_state_lives_under_home_unless_it_has_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.HOME, str(tmp_path / "home"))
    monkeypatch.delenv(environment.STATE_DIRECTORY, raising=False)
    assert environment.state_directory() == tmp_path / "home" / "state"
    monkeypatch.setenv(environment.STATE_DIRECTORY, str(tmp_path / "elsewhere"))
    assert environment.state_directory() == tmp_path / "elsewhere"


def test_home_defaults_to_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.HOME, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.home() == tmp_path / ".cache" / "adaptive-verification"


def test_only_a_launched_process_has_an_evidence_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.EVIDENCE_KEY, raising=False)
    assert environment.evidence_key() is None
    monkeypatch.setenv(environment.EVIDENCE_KEY, str(2**64 - 1))
    assert environment.evidence_key() == 2**64 - 1


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("max 100000", 4),
        ("6400000 100000", 4),
        (None, 4),
    ],
)
def test_a_containers_cpu_limit_counts(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(environment, "CGROUP_CPU_LIMIT", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert environment.available_cpus() == expected


def test_threads_reach_the_stages_as_text() -> None:
    assert environment.process_variables(3)["OMP_NUM_THREADS"] == "3"

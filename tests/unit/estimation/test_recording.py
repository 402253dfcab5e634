"""A recording holds exactly what the fit was given, and costs a server nothing it cannot afford."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.estimation.chain import KEY, MadeChain

from adaptive_verification.errors import TraceError
from adaptive_verification.estimation import recording
from adaptive_verification.estimation.recording_files import (
    REQUEST_NAME,
    RecordingRequest,
    end_request,
    recording_path,
    remove_recordings,
    trace_of,
    whole_lines,
)
from adaptive_verification.estimation.stage import STEPS_BETWEEN_DIRECTORY_READS, EstimatorStage
from adaptive_verification.estimation.trace import Trace, replay
from adaptive_verification.settings import EstimatorSettings


def _stage(directory: Path, **settings: Any) -> EstimatorStage:
    values = {"refit_interval": 10, "trim": "off", "max_draft_tokens": 8, "state_directory": str(directory), **settings}
    return EstimatorStage(EstimatorSettings.model_validate(values), evidence_key=KEY)


def _lines(directory: Path, identity: str = "a1") -> list[dict[str, Any]]:
    return [json.loads(line) for line in recording_path(directory, identity).read_text().splitlines()]


def _steps(directory: Path, identity: str = "a1") -> int:
    return sum("features" in line for line in _lines(directory, identity))


def _chains(stage: EstimatorStage, lookup_share: float) -> list[MadeChain]:
    """Two kinds of requests, so that their history matters."""
    return [
        MadeChain(
            stage,
            rows=6,
            intercept=intercept,
            seed=seed,
            first_id=100 * seed,
            lookup_share=lookup_share,
            with_features=True,
        )
        for seed, intercept in enumerate((1.0, -1.0))
    ]


@pytest.mark.parametrize("feature", ["logit_q_max", "gumbel_q_max", "log_q_max", "entropy", "top_two_margin"])
@pytest.mark.parametrize("evidence", ["none", "history"])
@pytest.mark.parametrize("lookup_share", [0.0, 0.5])
def test_a_recording_from_a_cold_start_replays_to_the_servers_coefficients(
    tmp_path: Path, evidence: str, feature: str, lookup_share: float
) -> None:
    RecordingRequest("a1", 95).write(tmp_path)
    stage = _stage(tmp_path, evidence=evidence, feature=feature)
    chains, coefficients = _chains(stage, lookup_share), []
    for number in range(100):
        before = stage.fit.refits
        chains[number % 2].step()
        if stage.fit.refits > before:
            coefficients.append([*stage.fit.shared.tolist(), *stage.fit.intercepts.tolist()])
    stage.close()
    lines = _lines(tmp_path)
    assert lines[-1] == {"ended": "complete"}
    recorded = json.loads(json.dumps(trace_of(lines)))
    assert recorded["cold_start"]
    trace = Trace.from_json(recorded)
    replayed = replay(trace, trace.constants)
    assert [refit["after_steps"] for refit in replayed.coefficients] == list(range(10, 96, 10))
    names = ("slope", "history") if evidence == "history" else ("slope",)
    flat, written = (
        np.array([[*(refit[name] for name in names), *refit["intercepts"]] for refit in refits])
        for refits in (replayed.coefficients, recorded["coefficients"])
    )
    np.testing.assert_array_equal(written, coefficients[: len(written)])
    np.testing.assert_allclose(flat, written, rtol=1e-5, atol=1e-6)  # rounding depends on the size of a batch
    assert flat[-1][0] != 0.5


def test_a_replays_calibration_is_the_servers(tmp_path: Path) -> None:
    RecordingRequest("a1", 60).write(tmp_path)
    stage = _stage(tmp_path, calibration_half_life_steps=0.0)
    chain = MadeChain(stage, rows=8, lookup_share=0.3)
    for _ in range(60):
        chain.step()
    trace = Trace.from_json(trace_of(_lines(tmp_path)))
    ours, servers = replay(trace, trace.constants).calibration.report(), stage.calibration.report()
    assert ours.labels == servers.labels > 100
    assert ours.log_loss == pytest.approx(servers.log_loss, abs=1e-6)
    assert ours.auc == pytest.approx(servers.auc, abs=1e-3)


def test_a_recording_holds_what_the_drafter_measured_and_nothing_where_it_did_not(tmp_path: Path) -> None:
    RecordingRequest("a1", 3).write(tmp_path)
    stage = _stage(tmp_path)
    chain = MadeChain(stage, rows=2, most_drafts=3, with_features=True)
    chain.step()
    chain.with_features = False
    chain.step()
    chain.step()
    first, with_features, without = Trace.from_json(json.loads(json.dumps(trace_of(_lines(tmp_path))))).steps
    assert len(first.admitted) == 0
    assert with_features.draft_features is not None
    measured = with_features.draft_features[:, :3]
    np.testing.assert_allclose(measured, with_features.log_odds[:, :3, None] - np.array([2.0, 1.0, 0.0]), atol=1e-6)
    assert without.draft_features is None


def test_a_line_that_is_not_whole_yet_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert whole_lines(path) == ([], 0)
    path.write_text('{"a": 1}\n{"b"')
    lines, read_to = whole_lines(path)
    assert lines == [{"a": 1}]
    path.write_text('{"a": 1}\n{"b": 2}\n')
    assert whole_lines(path, read_to)[0] == [{"b": 2}]


def test_a_running_server_starts_and_stops_recording_at_its_next_look(tmp_path: Path) -> None:
    stage = _stage(tmp_path)
    chain = MadeChain(stage, rows=2)
    for _ in range(STEPS_BETWEEN_DIRECTORY_READS):
        chain.step()
    RecordingRequest("a1", 10_000).write(tmp_path)
    for _ in range(STEPS_BETWEEN_DIRECTORY_READS):
        chain.step()
    assert _steps(tmp_path) == STEPS_BETWEEN_DIRECTORY_READS
    end_request(tmp_path)
    chain.step()
    assert _lines(tmp_path)[-1] == {"ended": "stopped"}
    assert not _lines(tmp_path)[0]["cold_start"]
    for _ in range(STEPS_BETWEEN_DIRECTORY_READS):
        chain.step()
    assert _steps(tmp_path) == STEPS_BETWEEN_DIRECTORY_READS


def test_a_newer_request_takes_over_and_a_served_one_is_not_served_again(tmp_path: Path) -> None:
    RecordingRequest("a1", 10_000).write(tmp_path)
    stage = _stage(tmp_path)
    chain = MadeChain(stage, rows=1)
    chain.step()
    RecordingRequest("b2", 3).write(tmp_path)
    for _ in range(3 * STEPS_BETWEEN_DIRECTORY_READS):
        chain.step()
    assert _lines(tmp_path, "a1")[-1] == {"ended": "stopped"}
    assert _steps(tmp_path, "b2") == 3
    assert not (tmp_path / REQUEST_NAME).exists()


def test_a_recording_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_BYTES", 1 << 20)
    RecordingRequest("a1", 100_000).write(tmp_path)
    stage = _stage(tmp_path)
    chain = MadeChain(stage, rows=64)
    for _ in range(300):
        chain.step()
    assert _lines(tmp_path)[-1] == {"ended": "larger than 1 MB"}
    assert recording_path(tmp_path, "a1").stat().st_size < 1.1 * (1 << 20)


def test_a_stopping_server_ends_its_recording(tmp_path: Path) -> None:
    RecordingRequest("a1", 100).write(tmp_path)
    stage = _stage(tmp_path)
    MadeChain(stage, rows=1).step()
    stage.close()
    assert _lines(tmp_path)[-1] == {"ended": "the server stopped"}
    assert not (tmp_path / REQUEST_NAME).exists()


@pytest.mark.parametrize(
    "request_text", ["{", "[]", '{"id": "../x", "steps": 3}', '{"id": "a", "steps": 0}', '{"id": "a", "steps": 1e9}']
)
def test_a_request_that_is_none_is_removed_with_a_warning(
    tmp_path: Path, request_text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / REQUEST_NAME).write_text(request_text)
    with caplog.at_level(logging.WARNING):
        MadeChain(_stage(tmp_path), rows=1).step()
    assert "cannot be used" in caplog.text
    assert not (tmp_path / REQUEST_NAME).exists()
    assert not list(tmp_path.glob("recording-*"))


def test_a_full_disk_ends_the_recording_and_not_the_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RecordingRequest("a1", 100).write(tmp_path)
    recording_path(tmp_path, "a1").symlink_to("/dev/full")
    chain = MadeChain(_stage(tmp_path), rows=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            estimate, _ = chain.step()
    assert estimate.num_rows == 1
    assert "No space left" in caplog.text


def test_untrusted_steps_are_not_recorded(tmp_path: Path) -> None:
    RecordingRequest("a1", 100).write(tmp_path)
    stage = _stage(tmp_path)
    stranger, trusted = MadeChain(stage, rows=1, first_id=50), MadeChain(stage, rows=1)
    trusted.step()
    for _ in range(5):
        stranger.step(key=KEY + 1)
    trusted.step()
    assert _steps(tmp_path) == 2
    assert {sequence for line in _lines(tmp_path)[1:] for sequence in line["sequences"]} == {0}


def test_a_recording_without_a_step_is_no_trace() -> None:
    with pytest.raises(TraceError, match="nothing was recorded"):
        trace_of([])
    with pytest.raises(TraceError, match="nothing was recorded"):
        trace_of([{"num_speculative_tokens": 3}, {"ended": "stopped"}])


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("recording-1.jsonl", "recording-2.jsonl", "estimator.json"):
        (tmp_path / name).write_text("")
    remove_recordings(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["estimator.json"]

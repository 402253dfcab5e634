"""`adaptive-verification record` and `replay`, with an estimator stage in the server's place."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tests.unit.estimation.chain import KEY, MadeChain
from tests.unit.estimation.test_trace import made_trace

from adaptive_verification.estimation.recording_files import REQUEST_NAME
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.serving import trace_commands
from adaptive_verification.serving.cli import main
from adaptive_verification.settings import EstimatorSettings


class ServerThread:
    """A stage that steps until it is stopped, once somebody has asked for a recording."""

    def __init__(self, directory: Path, after_step: Callable[[int], None] = lambda step: None) -> None:
        self._settings = {"state_directory": str(directory), "refit_interval": 10, "trim": "off"}
        self._request = directory / REQUEST_NAME
        self._after_step = after_step
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._request.exists():
            if self._stopping.wait(0.01):
                return
        self.stage = EstimatorStage(EstimatorSettings.model_validate(self._settings), evidence_key=KEY)
        chain = MadeChain(self.stage, rows=4)
        while not self._stopping.is_set():
            chain.step()
            self._after_step(self.stage.steps)
        self.stage.close()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_commands, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(trace_commands, "SILENCE_S", 0.05)


@pytest.fixture
def started() -> Iterator[list[ServerThread]]:
    servers: list[ServerThread] = []
    yield servers
    for server in servers:
        server.stop()


def record(directory: Path, trace: Path, *arguments: str) -> int:
    return main(["record", str(trace), "--state-directory", str(directory), *arguments])


def test_what_is_recorded_from_the_first_step_replays_to_the_servers_coefficients(
    tmp_path: Path, started: list[ServerThread], capsys: pytest.CaptureFixture[str]
) -> None:
    started.append(ServerThread(tmp_path))
    assert record(tmp_path, tmp_path / "trace.json", "--steps", "45") == 0
    output = capsys.readouterr()
    assert f"45 steps are in {tmp_path / 'trace.json'} (the recording ended: complete)" in output.out
    assert "45/45" in output.err  # the progress bar
    assert "cold" not in output.out
    assert main(["replay", str(tmp_path / "trace.json")]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed == json.loads((tmp_path / "trace.json").read_text())["coefficients"]
    assert [refit["after_steps"] for refit in replayed] == [10, 20, 30, 40]
    assert set(replayed[0]) == {"after_steps", "slope", "history", "intercepts"}
    assert not list(tmp_path.glob("record*.json*"))


def test_a_recording_of_a_warm_server_says_that_a_replay_starts_cold(
    tmp_path: Path, started: list[ServerThread], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = EstimatorStage(EstimatorSettings.model_validate({"state_directory": str(tmp_path)}), evidence_key=KEY)
    MadeChain(stage, rows=1).step()
    stage.close()
    started.append(ServerThread(tmp_path))
    assert record(tmp_path, tmp_path / "trace.json", "--steps", "5") == 0
    assert "starts cold" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_there(
    tmp_path: Path, started: list[ServerThread], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(step: int) -> None:
        if step == 20:
            signal.raise_signal(signal.SIGINT)

    started.append(ServerThread(tmp_path, interrupt))
    assert record(tmp_path, tmp_path / "trace.json", "--steps", "100000") == 0
    assert "interrupted" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "trace.json").read_text())["steps"]) > 0
    assert not (tmp_path / REQUEST_NAME).exists()


def test_a_server_that_ends_ends_the_recording(
    tmp_path: Path, started: list[ServerThread], capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(step: int) -> None:
        if step == 20:
            started[0]._stopping.set()

    started.append(ServerThread(tmp_path, stop))
    assert record(tmp_path, tmp_path / "trace.json", "--steps", "1000") == 0
    assert "20 steps" in capsys.readouterr().out


def test_a_server_that_is_killed_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes no last line, and its lock goes with it."""

    def killed(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
        step: dict[str, Any] = {"features": [], "admitted": [], "accepted": [], "sequences": []}
        return ([{"num_speculative_tokens": 2, "cold_start": True}, step], 1) if start == 0 else ([], 1)

    monkeypatch.setattr(trace_commands, "whole_lines", killed)
    assert record(tmp_path, tmp_path / "trace.json") == 0
    assert "1 steps" in capsys.readouterr().out


def test_without_a_server_it_says_so_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def is_in_use(directory: Path) -> bool:
        asked.append(directory)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(trace_commands, "is_in_use", is_in_use)
    assert record(tmp_path, tmp_path / "trace.json") == 1
    errors = capsys.readouterr().err
    assert errors.count(f"No server is running on {tmp_path}; waiting for one.") == 1
    assert "nothing was recorded" in errors
    assert not (tmp_path / "trace.json").exists()
    assert not (tmp_path / REQUEST_NAME).exists()


def test_two_do_not_record_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(tmp_path / "record.lock"):
        assert record(tmp_path, tmp_path / "trace.json") == 1
    assert "somebody else is recording" in capsys.readouterr().err


def test_a_trace_that_could_not_be_written_is_refused_before_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record(tmp_path, tmp_path / "nowhere" / "trace.json") == 1
    assert "cannot be written" in capsys.readouterr().err


def test_replay_with_options_fits_differently_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(made_trace()))
    options = ["--refit-interval", "20", "--damping-observations", "5", "--feature", "log_q_max", "--calibration"]
    assert main(["replay", str(tmp_path / "trace.json"), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [refit["after_steps"] for refit in result["coefficients"]] == [20, 40]
    quality = result["calibration"]
    assert {"auc", "log_loss", "calibration_error"} < set(quality)
    assert len(quality["positions"]) == 5
    assert sum(position["labels"] for position in quality["positions"]) == pytest.approx(quality["labels"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--refit-interval", "0"], "refit_interval"),
        (["--feature", "logit_q_drawn"], "biases the output"),
        (["--evidence", "history"], "sequences"),
        (["--evidence", "rumour"], "evidence"),
    ],
)
def test_an_option_that_cannot_be_tried_is_one_message(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(made_trace(steps=2)))
    assert main(["replay", str(tmp_path / "trace.json"), *options]) == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors

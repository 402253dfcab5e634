"""A folder of recordings grows until there are enough labels, whatever cuts a recording off."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from perf import feature_recording
from perf.feature_recording import SteadyLoad, read_traces, record, recorded_labels
from tests.unit.estimation.chain import KEY, MadeChain

from adaptive_verification.errors import SetupError
from adaptive_verification.estimation.recording_files import REQUEST_NAME, RecordingRequest, recording_path
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings


class NoLoad:
    """Stands where a load stands that goes on."""

    def check(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_recording, "_POLL_INTERVAL_S", 0.01)


@pytest.fixture
def estimator(tmp_path: Path) -> Iterator[EstimatorStage]:
    """A stage that steps, with drafts of a made model, until the test ends."""
    settings = EstimatorSettings(state_directory=str(tmp_path), trim="off", max_draft_tokens=7)
    stage = EstimatorStage(settings, evidence_key=KEY)
    chain = MadeChain(stage, rows=4, with_features=True)
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            chain.step()

    thread = threading.Thread(target=run)
    thread.start()
    yield stage
    stopping.set()
    thread.join()
    stage.close()


def test_recordings_add_up_until_there_are_enough_labels(tmp_path: Path, estimator: EstimatorStage) -> None:
    record(NoLoad(), tmp_path, 300)  # type: ignore[arg-type]
    first = recorded_labels(tmp_path)
    assert first >= 300
    assert not (tmp_path / REQUEST_NAME).exists()
    record(NoLoad(), tmp_path, first + 200)  # type: ignore[arg-type]
    assert recorded_labels(tmp_path) >= first + 200
    traces = read_traces(tmp_path)
    assert len(traces) == 2
    assert all(step.draft_features is not None for trace in traces for step in trace.steps)


def test_a_recording_that_ends_is_followed_by_another(
    tmp_path: Path, estimator: EstimatorStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_recording, "MAX_STEPS", 20)
    record(NoLoad(), tmp_path, 400)  # type: ignore[arg-type]
    assert recorded_labels(tmp_path) >= 400
    assert len(read_traces(tmp_path)) > 1


def test_a_recording_cut_off_in_mid_line_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    RecordingRequest("a1", 100).write(tmp_path)
    settings = EstimatorSettings(state_directory=str(tmp_path), trim="off", max_draft_tokens=7)
    chain = MadeChain(EstimatorStage(settings, evidence_key=KEY), rows=4, with_features=True)
    for _ in range(5):
        chain.step()
    path = recording_path(tmp_path, "a1")
    whole = recorded_labels(tmp_path)
    path.write_text(path.read_text()[:-30])
    assert 0 < recorded_labels(tmp_path) < whole
    assert len(read_traces(tmp_path)[0].steps) == 4


def test_a_folder_without_recordings_has_nothing(tmp_path: Path) -> None:
    assert recorded_labels(tmp_path) == 0
    assert read_traces(tmp_path) == []


class Server:
    """Answers after a moment, and notes how many requests it had at a time, and their inputs."""

    def __init__(self, status: int = 200) -> None:
        self.most = self.present = 0
        self.seen: list[dict[str, Any]] = []
        self.enough = threading.Event()
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    server.present += 1
                    server.most = max(server.most, server.present)
                    server.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                    if len(server.seen) >= 30:
                        server.enough.set()
                time.sleep(0.01)
                with lock:
                    server.present -= 1
                body = b'{"error": "top_p is 2"}'
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def test_so_many_requests_are_in_flight_and_no_more(servers: list[Server]) -> None:
    servers.append(Server())
    with SteadyLoad(servers[0].url, ({"seed": seed} for seed in range(10**6)), 3) as load:
        assert servers[0].enough.wait(10)
        load.check()
    assert servers[0].most == 3
    seeds = [inputs["seed"] for inputs in servers[0].seen]
    assert sorted(seeds) == list(range(len(seeds)))


def test_a_refused_request_is_told_with_the_servers_reason(servers: list[Server]) -> None:
    servers.append(Server(status=400))
    with SteadyLoad(servers[0].url, repeat({"top_p": 2}), 1) as load:
        for thread in load._threads:
            thread.join(10)
        with pytest.raises(SetupError, match="top_p is 2"):
            load.check()

"""One real tritonserver with the default pair for all integration tests."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adaptive_verification.serving.launcher import RunningServer, ServerOptions, running_server


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: its status and its JSON."""

    status: int
    body: dict[str, Any]


class GenerateClient:
    """The text front over HTTP."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server

    def generate(self, **request: Any) -> Answer:
        body = json.dumps(request).encode()
        try:
            with urllib.request.urlopen(f"{self._server.http_url}/v2/models/generate/generate", body) as response:
                return Answer(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.load(error))

    def generate_all(self, requests: list[dict[str, Any]]) -> list[Answer]:
        """All requests at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self.generate(**request), requests))

    def stream(self, **request: Any) -> list[dict[str, Any]]:
        """The events of one streamed answer."""
        body = json.dumps({**request, "stream": True}).encode()
        with urllib.request.urlopen(f"{self._server.http_url}/v2/models/generate/generate_stream", body) as response:
            return [json.loads(line.removeprefix(b"data: ")) for line in response if line.startswith(b"data: ")]

    def metric(self, name: str, label: str = "") -> float:
        """The value of one metric, e.g. `av_draft_tokens_total`, `state="accepted"`."""
        wanted = f"{name}{{{label}}}" if label else name
        with urllib.request.urlopen(self._server.metrics_url) as response:
            for line in response.read().decode().splitlines():
                key, _, value = line.rpartition(" ")
                if key == wanted:
                    return float(value)
        raise KeyError(wanted)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Raises AssertionError: it did not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.05)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The default pair in float32, where greedy text does not depend on the batch."""
    settings = {"dtype": "float32", "num_draft_tokens": "7"}
    options = ServerOptions(settings=settings, state_directory=tmp_path_factory.mktemp("state"))
    with running_server(options) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> GenerateClient:
    return GenerateClient(server)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    return Path(__file__).parents[2]

"""Records a server's evidence under a steady load, into a folder in which the next run goes on.

The folder is the server's state directory, so what was recorded is on the disk whatever happens. Recordings that were
cut off are as good as whole ones.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from adaptive_verification.errors import SetupError, TraceError
from adaptive_verification.estimation.recording_files import (
    MAX_STEPS,
    RecordingRequest,
    end_request,
    recording_path,
    trace_of,
    whole_lines,
)
from adaptive_verification.estimation.trace import Trace
from perf.feature_labels import count_labels

_POLL_INTERVAL_S = 0.2


class SteadyLoad:
    """Keeps so many requests in flight, each answered in one piece, from entering to leaving the context.

    Args:
        http_url: of the server.
        requests: inputs of `generate`; endless.
        concurrency: how many at a time.
    """

    def __init__(self, http_url: str, requests: Iterator[dict[str, Any]], concurrency: int) -> None:
        self._url = f"{http_url}/v2/models/generate/generate"
        self._requests = requests
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._failure: str | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(concurrency)]

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Sends no more; what is in flight is left to the server, which is about to stop."""
        self._leaving.set()

    def check(self) -> None:
        """Raises SetupError: a request failed."""
        if self._failure is not None:
            raise SetupError(f"a request failed: {self._failure}")

    def _run(self) -> None:
        while not self._leaving.is_set() and self._failure is None:
            with self._lock:
                inputs = next(self._requests)
            try:
                with urllib.request.urlopen(self._url, json.dumps(inputs).encode()) as response:
                    response.read()
            except urllib.error.HTTPError as error:
                self._fail(error.read().decode(errors="replace"))
            except (OSError, http.client.HTTPException) as error:
                self._fail(repr(error))

    def _fail(self, reason: str) -> None:
        if not self._leaving.is_set():
            self._failure = reason


def record(load: SteadyLoad, directory: Path, num_labels: int) -> None:
    """Records until the folder has so many labelled drafts, with a bar that shows rate and time left.

    Args:
        load: going on, at a server that runs on the folder.
        directory: the folder.

    Raises:
        SetupError: a request failed.
    """
    present = recorded_labels(directory)
    with tqdm(total=num_labels, initial=present, unit="label") as progress:
        while present < num_labels:
            identity = f"{time.time_ns():x}"  # the next one sorts behind it
            RecordingRequest(identity, MAX_STEPS).write(directory)
            try:
                for lines in _follow(recording_path(directory, identity), load):
                    new = count_labels(lines)
                    progress.update(new)
                    present += new
                    if present >= num_labels:
                        break
            finally:
                end_request(directory)


def recorded_labels(directory: Path) -> int:
    """Labelled drafts in the folder."""
    return sum(count_labels(lines) for lines in _recordings(directory))


def read_traces(directory: Path) -> list[Trace]:
    """All recordings of the folder, in the order in which they were made.

    Raises:
        TraceError: a recording is damaged.
    """
    traces = []
    for lines in _recordings(directory):
        if any("features" in line for line in lines):
            try:
                traces.append(Trace.from_json(trace_of(lines)))
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"a recording in {directory} is damaged: {error!r}") from None
    return traces


def _recordings(directory: Path) -> list[list[dict[str, Any]]]:
    return [whole_lines(path)[0] for path in sorted(directory.glob("recording-*.jsonl"))]


def _follow(path: Path, load: SteadyLoad) -> Iterator[list[dict[str, Any]]]:
    """A growing recording's new lines, now and then, until it ends."""
    read_to = 0
    while True:
        load.check()
        lines, read_to = whole_lines(path, read_to)
        yield lines
        if lines and "ended" in lines[-1]:
            return
        time.sleep(_POLL_INTERVAL_S)

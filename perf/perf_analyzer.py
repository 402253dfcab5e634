"""Runs Triton's perf_analyzer (from the wheel tritonclient) against `generate` and reads its report.

The binary needs two libraries that the wheel nvidia-pytriton carries under other names; inside NGC's containers they
are installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.*"}
_ENDLESS = 1_000_000
"""Requests that no run lives to send."""


@dataclass(frozen=True)
class StreamReport:
    """One run. Times in seconds, medians over requests."""

    requests: int
    responses: int
    output_tokens: int
    duration_s: float
    """From the first request to the last response."""
    time_to_first_response_s: float
    time_between_responses_s: float
    time_per_output_token_s: float
    """After the first response."""
    requests_per_second: float


def write_input_data(
    path: Path, prompts: Sequence[str], *, max_tokens: int | Sequence[int], chat: bool = False, **inputs: Any
) -> None:
    """perf_analyzer's input file: the prompts in turn, each with the same other inputs of `generate`.

    `max_tokens` is one for all, or one for each prompt. With `chat` each is a user's turn, put into the target's chat
    template, else plain text. To an instruction-tuned target plain text is odd enough that many answers end at once.
    """
    entries = [
        {"messages": json.dumps([{"role": "user", "content": prompt}])} if chat else {"text_input": prompt}
        for prompt in prompts
    ]
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    data = [
        {name: [value] for name, value in {**entry, "max_tokens": limit, **inputs}.items()}
        for entry, limit in zip(entries, limits, strict=True)
    ]
    path.write_text(json.dumps({"data": data}))


def run(
    grpc_url: str, input_data: Path, *, concurrency: int, request_count: int, timeout_s: float, attempts: int = 3
) -> StreamReport:
    """Streams `request_count` requests, `concurrency` at a time.

    Raises:
        RuntimeError: perf_analyzer failed, so many times; the message holds what it printed.
        subprocess.TimeoutExpired: it was still running after `timeout_s`.
    """
    for _ in range(attempts - 1):
        with contextlib.suppress(RuntimeError):
            return _run_once(grpc_url, input_data, concurrency, request_count, timeout_s)
    return _run_once(grpc_url, input_data, concurrency, request_count, timeout_s)


@contextlib.contextmanager
def keep_running(grpc_url: str, input_data: Path, *, concurrency: int) -> Iterator[Callable[[], None]]:
    """Streams requests, `concurrency` at a time, until the context is left; those in flight are cancelled then.

    Gives a check, to be called now and then: it raises RuntimeError, with what perf_analyzer printed, if it has ended.
    There is no report: told to end by SIGINT, perf_analyzer waits for the requests in flight and then, with streams,
    for ever. SIGTERM ends it at once.
    """
    with _library_path() as library_path, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            _command(grpc_url, input_data, concurrency, _ENDLESS),
            env={**os.environ, "LD_LIBRARY_PATH": library_path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )

        def check() -> None:
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"perf_analyzer ended ({process.returncode}):\n{log.read()[-2000:]}")

        try:
            yield check
        finally:
            process.terminate()
            process.wait()


def _run_once(grpc_url: str, input_data: Path, concurrency: int, request_count: int, timeout_s: float) -> StreamReport:
    with tempfile.TemporaryDirectory() as directory, _library_path() as library_path:
        report = Path(directory, "profile.json")
        done = subprocess.run(
            [*_command(grpc_url, input_data, concurrency, request_count), "--profile-export-file", str(report)],
            env={**os.environ, "LD_LIBRARY_PATH": library_path},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        # now and then it exits with 0 before its report is wholly written
        try:
            return _read(json.loads(report.read_text())) if done.returncode == 0 else _fail(done)
        except (OSError, json.JSONDecodeError):
            return _fail(done)


def _command(grpc_url: str, input_data: Path, concurrency: int, request_count: int) -> list[str]:
    return [
        _binary(), "-m", "generate", "-u", grpc_url, "-i", "grpc", "--streaming", "--async",
        "--input-data", str(input_data), "--concurrency-range", str(concurrency),
        "--request-count", str(request_count),
    ]  # fmt: skip


def _fail(done: subprocess.CompletedProcess[str]) -> NoReturn:
    raise RuntimeError(f"perf_analyzer failed ({done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _read(profile: dict[str, Any]) -> StreamReport:
    requests = [request for experiment in profile["experiments"] for request in experiment["requests"]]
    first, between, per_token, output_tokens = [], [], [], 0
    for request in requests:
        stamps = request["response_timestamps"]
        tokens = [response["num_output_tokens"] for response in request["response_outputs"]]
        output_tokens += sum(tokens)
        first.append(stamps[0] - request["timestamp"])
        if len(stamps) > 1:
            between.append((stamps[-1] - stamps[0]) / (len(stamps) - 1))
        if sum(tokens[1:]):
            per_token.append((stamps[-1] - stamps[0]) / sum(tokens[1:]))
    started = min(request["timestamp"] for request in requests)
    ended = max(request["response_timestamps"][-1] for request in requests)
    duration_s = (ended - started) / 1e9
    return StreamReport(
        requests=len(requests),
        responses=sum(len(request["response_timestamps"]) for request in requests),
        output_tokens=output_tokens,
        duration_s=duration_s,
        time_to_first_response_s=_median(first) / 1e9,
        time_between_responses_s=_median(between) / 1e9,
        time_per_output_token_s=_median(per_token) / 1e9,
        requests_per_second=len(requests) / duration_s,
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else float("nan")


def _binary() -> str:
    beside_python = Path(sys.executable).with_name("perf_analyzer")
    found = str(beside_python) if beside_python.exists() else shutil.which("perf_analyzer")
    if found is None:
        raise RuntimeError("perf_analyzer is not installed; the wheel tritonclient==2.50.0 carries it")
    return found


@contextlib.contextmanager
def _library_path() -> Iterator[str]:
    """LD_LIBRARY_PATH with the libraries under the names that perf_analyzer asks for."""
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    with tempfile.TemporaryDirectory() as directory:
        for entry in sys.path:
            for name, pattern in _LIBRARIES.items():
                for library in Path(entry, "nvidia_pytriton.libs").glob(pattern):
                    link = Path(directory, name)
                    if not link.exists():
                        link.symlink_to(library)
        yield f"{directory}:{inherited}" if inherited else directory

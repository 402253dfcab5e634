"""What is read from perf_analyzer's report, and what is done when it leaves none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from perf import perf_analyzer


def request(start_ms: int, responses: list[tuple[int, int]]) -> dict[str, Any]:
    """A request of the report; responses: (time in ms, tokens in it)."""
    return {
        "timestamp": start_ms * 1_000_000,
        "response_timestamps": [time * 1_000_000 for time, _ in responses],
        "response_outputs": [{"num_output_tokens": tokens} for _, tokens in responses],
    }


def test_a_report_counts_tokens_where_a_response_holds_several() -> None:
    requests = [request(0, [(100, 1), (400, 3)]), request(500, [(700, 2), (800, 1), (1000, 2)])]
    report = perf_analyzer._read({"experiments": [{"requests": requests}]})
    assert (report.requests, report.responses, report.output_tokens) == (2, 5, 9)
    assert report.duration_s == pytest.approx(1.0)
    assert report.time_to_first_response_s == pytest.approx(0.2)  # the upper of 100 and 200 ms
    assert report.time_per_output_token_s == pytest.approx(0.1)  # 300 ms / 3 and 300 ms / 3


def test_a_run_that_left_no_report_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = perf_analyzer._read({"experiments": [{"requests": [request(0, [(100, 1)])]}]})
    attempts: Iterator[RuntimeError | perf_analyzer.StreamReport] = iter([RuntimeError("it is unfinished"), report])

    def fail_once(*_: object) -> perf_analyzer.StreamReport:
        attempt = next(attempts)
        if isinstance(attempt, RuntimeError):
            raise attempt
        return attempt

    monkeypatch.setattr(perf_analyzer, "_run_once", fail_once)
    assert perf_analyzer.run("", tmp_path, concurrency=1, request_count=1, timeout_s=1) is report
    assert not list(attempts)


def program(monkeypatch: pytest.MonkeyPatch, file: Path, script: str) -> None:
    """Takes perf_analyzer's place."""
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "_binary", lambda: str(file))


def test_streams_end_with_their_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where it does not heed SIGINT."""
    program(monkeypatch, tmp_path / "endless", f"trap '' INT; echo $$ > {tmp_path}/pid; exec sleep 1000")
    with perf_analyzer.keep_running("", tmp_path, concurrency=1) as check:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            check()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_streams_that_end_early_are_noticed_with_what_was_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(monkeypatch, tmp_path / "failing", "echo no such model; exit 3")

    def check_until_it_ends() -> None:
        with perf_analyzer.keep_running("", tmp_path, concurrency=1) as check:
            while True:
                check()

    with pytest.raises(RuntimeError, match=r"(?s)\(3\).*no such model"):
        check_until_it_ends()


def test_chats_and_plain_prompts_are_written_as_the_inputs_of_generate(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    perf_analyzer.write_input_data(file, ["Hello"], max_tokens=4)
    assert json.loads(file.read_text()) == {"data": [{"text_input": ["Hello"], "max_tokens": [4]}]}
    perf_analyzer.write_input_data(file, ["Hello"], chat=True, max_tokens=4)
    (entry,) = json.loads(file.read_text())["data"]
    assert json.loads(entry["messages"][0]) == [{"role": "user", "content": "Hello"}]


def test_each_prompt_may_have_a_length_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    perf_analyzer.write_input_data(file, ["Hello", "Bye"], max_tokens=[4, 9], seed=1)
    assert json.loads(file.read_text())["data"] == [
        {"text_input": ["Hello"], "max_tokens": [4], "seed": [1]},
        {"text_input": ["Bye"], "max_tokens": [9], "seed": [1]},
    ]

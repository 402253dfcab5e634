"""What is read from perf_analyzer's report, and what is done when it leaves none."""

from __future__ import annotations

import json
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


def test_every_attempt_is_prepared_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events: list[str] = []

    def fail_once(*_: object) -> None:
        events.append("attempt")
        if events.count("attempt") == 1:
            raise RuntimeError("its report is unfinished")

    monkeypatch.setattr(perf_analyzer, "_run_once", fail_once)
    perf_analyzer.run(
        "", tmp_path, concurrency=1, request_count=1, timeout_s=1, prepare=lambda: events.append("prepare")
    )
    assert events == ["prepare", "attempt", "prepare", "attempt"]


def test_chats_and_plain_prompts_are_written_as_the_inputs_of_generate(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    perf_analyzer.write_input_data(file, ["Hello"], max_tokens=4)
    assert json.loads(file.read_text()) == {"data": [{"text_input": ["Hello"], "max_tokens": [4]}]}
    perf_analyzer.write_input_data(file, ["Hello"], chat=True, max_tokens=4)
    (entry,) = json.loads(file.read_text())["data"]
    assert json.loads(entry["messages"][0]) == [{"role": "user", "content": "Hello"}]

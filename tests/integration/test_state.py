"""What the estimator learned on a real server outlives it, can be seen while it runs, and can be recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import GenerateClient
from tests.tiny_models import CONFIGS, VOCAB_SIZE, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from adaptive_verification.estimation.recording_files import REQUEST_NAME
from adaptive_verification.estimation.state import FILE_NAME
from adaptive_verification.estimation.trace import Trace, replay
from adaptive_verification.serving.cli import main
from adaptive_verification.serving.launcher import RunningServer, ServerOptions, running_server
from adaptive_verification.serving.metrics import PUBLISH_INTERVAL_SECONDS

REQUESTS: list[dict[str, Any]] = [
    {"text_input": f"w{i} w{i + 1} w{i + 2}", "max_tokens": 40, "temperature": 1.0, "seed": i, "num_draft_tokens": 4}
    for i in range(8)
]
FIRST = 'position="1"'


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens are the words w0, w1, ... It never ends a text by itself."""
    directory = tmp_path_factory.mktemp("target")
    tiny_model(CONFIGS["llama"]).save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def options(target: Path, state_directory: Path) -> ServerOptions:
    return ServerOptions(
        settings={
            "target": str(target),
            "drafter": "first-layers:2",
            "dtype": "float32",
            "device": "cpu",
            "max_context_tokens": "64",
            "refit_interval": "5",
            "trim": "off",
        },
        state_directory=state_directory,
        threads=1,
    )


def metrics(server: RunningServer) -> dict[tuple[str, str], float]:
    """(name, label) -> value of everything at /metrics."""
    with urllib.request.urlopen(server.metrics_url) as response:
        lines = response.read().decode().splitlines()
    keys_and_values = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    names_and_labels = [(*key.partition("{"), value) for key, value in keys_and_values]
    return {(name, label.rstrip("}")): float(value) for name, _, label, value in names_and_labels}


def settled_metrics(server: RunningServer, is_settled: Callable[[dict[tuple[str, str], float]], bool]) -> Any:
    """The metrics once they are of the last step: settled, and the same over several publications.

    The estimator's steps are published after all else of a step, and after the last answer comes a step that only
    releases.
    """
    deadline = time.monotonic() + 60
    steps, same_since = -1.0, time.monotonic()
    while time.monotonic() - same_since < 3 * PUBLISH_INTERVAL_SECONDS:
        values = metrics(server)
        assert time.monotonic() < deadline, {key: value for key, value in values.items() if key[0].startswith("av_")}
        if not is_settled(values) or values["av_estimator_steps_total", ""] != steps:
            steps, same_since = values["av_estimator_steps_total", ""], time.monotonic()
        threading.Event().wait(0.05)
    return values


def no_step_is_missing(values: dict[tuple[str, str], float]) -> bool:
    idle = values["av_live_sequences", ""] == values["av_waiting_requests", ""] == 0
    return idle and values["av_estimator_steps_total", ""] == values["av_steps_total", ""] > 0


def record(state_directory: Path, trace_file: Path) -> subprocess.Popen[str]:
    """Asks for a recording before the server starts, so that the trace begins with its first step."""
    command = [sys.executable, "-m", "adaptive_verification.serving.cli", "record", str(trace_file)]
    recorder = subprocess.Popen(
        [*command, "--steps", "100000", "--state-directory", str(state_directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (state_directory / REQUEST_NAME).exists():
        assert recorder.poll() is None
        threading.Event().wait(0.05)
    return recorder


def test_a_second_server_starts_where_the_first_stopped_and_its_recording_replays_to_its_coefficients(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_directory, trace_file = tmp_path / "state", tmp_path / "trace.json"
    recorder = record(state_directory, trace_file)
    with running_server(options(target, state_directory)) as server:
        assert all(answer.status == 200 for answer in GenerateClient(server).generate_all(REQUESTS))
        assert main(["state", "reset", "--yes", "--state-directory", str(state_directory)]) == 1
        assert "a server is running" in capsys.readouterr().err
        live = settled_metrics(server, no_step_is_missing)
    assert "the server stopped" in recorder.communicate(timeout=60)[0]

    kept = json.loads((state_directory / FILE_NAME).read_text())["state"]
    fit, counts = kept["fit"], kept["counts"]
    assert fit["refits"] >= 3
    assert counts[0][0] > 8 > counts[0][4] == 0
    # what the first server showed at the end is what it kept
    assert live["av_estimator_steps_total", ""] == kept["steps"]
    assert live["av_estimator_refits_total", ""] == fit["refits"]
    assert live["av_estimator_slope", ""] == pytest.approx(fit["shared"][0])
    for kind, name in enumerate(("drafted", "admitted", "accepted")):
        assert live[f"av_estimator_{name}_tokens_total", FIRST] == counts[kind][0]
    assert 0 < live["av_estimator_auc", ""] <= 1
    assert live["av_estimator_position_log_loss", FIRST] > 0

    # the recording, fitted offline, comes to the same coefficients
    recorded = json.loads(trace_file.read_text())
    assert recorded["cold_start"]
    trace = Trace.from_json(recorded)
    last = replay(trace, trace.constants).coefficients[-1]
    assert [last["slope"], last["history"]] == pytest.approx(fit["shared"], rel=1e-5)
    assert last["intercepts"] == pytest.approx(fit["intercepts"], rel=1e-5, abs=1e-6)

    with running_server(options(target, state_directory)) as server:
        again = settled_metrics(server, lambda values: values["av_estimator_steps_total", ""] == kept["steps"])
    for name in ("steps_total", "refits_total", "slope", "history_coefficient", "auc", "log_loss"):
        assert again[f"av_estimator_{name}", ""] == pytest.approx(live[f"av_estimator_{name}", ""])
    for name in ("drafted_tokens_total", "accepted_tokens_total", "position_intercept", "position_auc"):
        assert again[f"av_estimator_{name}", FIRST] == pytest.approx(live[f"av_estimator_{name}", FIRST])
    assert json.loads((state_directory / FILE_NAME).read_text())["state"]["fit"] == fit

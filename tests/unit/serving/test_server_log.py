"""What of the server's log a user gets to see, on lines as tritonserver 2.51 writes them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from adaptive_verification.serving.server_log import TAIL_LINES, ServerLog, failure_reason

NOISE = 'E1129 20:48:36.718276 4992 server.cc:241] "CudaDriverHelper has not been initialized."\n'
STAGE_WARNING = 'W1129 20:50:05.305365 5412 model.py:14] "a damaged state file was set aside"\n'
OUR_ERROR = (
    "E1129 20:48:37.080867 4992 model_lifecycle.cc:642] \"failed to load 'verifier' version 1: Internal: "
    'UnsupportedModel: /m has sliding windows; only full attention is supported\\n\\nAt:\\n  /r/model.py(12): x\\n"\n'
)
OTHER_ERROR = (
    "E1129 20:48:37.080867 4992 model_lifecycle.cc:642] \"failed to load 'drafter' version 1: Internal: "
    "KeyError: 'x'\\n\\nAt:\\n  /r/model.py(12): initialize\\n\"\n"
)
CRASH = (
    "E1129 20:48:40.495800 5038 model_lifecycle.cc:642] \"failed to load 'drafter' version 1: Internal: "
    "Stub process 'drafter_0_0' is not healthy.\"\n"
)
BAD_CONFIG = (
    "E1129 20:48:40.495800 5038 model_repository_manager.cc:1460] \"Poll failed for model directory 'generate': "
    'unexpected platform type"\n'
)


def test_an_error_of_ours_is_shown_without_its_place_in_the_code() -> None:
    log = NOISE + OUR_ERROR
    assert failure_reason(log) == "model verifier: /m has sliding windows; only full attention is supported"


def test_an_unexpected_error_keeps_its_type_and_place() -> None:
    reason = failure_reason(NOISE + OTHER_ERROR)
    assert reason == "model drafter: KeyError: 'x'\n\nAt:\n  /r/model.py(12): initialize"


def test_a_dead_stage_and_a_bad_configuration_are_named() -> None:
    reason = failure_reason(CRASH + BAD_CONFIG)
    assert "model drafter: Stub process 'drafter_0_0' is not healthy. Its process died while loading" in reason
    assert "model generate: unexpected platform type" in reason


def test_without_a_failed_model_the_end_of_the_log_is_shown() -> None:
    lines = [f"line {i}" for i in range(100)]
    assert failure_reason("\n".join(lines)) == "\n".join(lines[-TAIL_LINES:])


@pytest.mark.parametrize(("verbose", "shown"), [(False, STAGE_WARNING), (True, NOISE + STAGE_WARNING + "printed\n")])
def test_the_file_gets_everything_and_the_console_what_was_asked_for(
    verbose: bool, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = NOISE + STAGE_WARNING + "printed\n"
    log = ServerLog(io.StringIO(everything), tmp_path / "logs" / "server.log", verbose=verbose)
    log.close()
    assert log.path.read_text() == everything
    assert capsys.readouterr().err == shown

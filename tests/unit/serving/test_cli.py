"""The command line: what reaches the launcher, and failures as one message."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptive_verification.errors import SetupError
from adaptive_verification.serving import cli, signals
from adaptive_verification.serving.launcher import ServerOptions
from adaptive_verification.settings import SETTINGS_BY_MODEL


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """The options of each server that would have been started."""
    options: list[ServerOptions] = []

    @contextlib.contextmanager
    def running_server(given: ServerOptions) -> Iterator[None]:
        options.append(given)
        raise KeyboardInterrupt
        yield  # makes it a context manager

    monkeypatch.setattr(cli, "running_server", running_server)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return options


def test_serve_without_options_is_the_repository_as_it_is_on_tritons_ports(started: list[ServerOptions]) -> None:
    assert cli.main(["serve"]) == 0
    assert started == [ServerOptions(http_port=8000, grpc_port=8001, metrics_port=8002)]


def test_options_reach_the_launcher(started: list[ServerOptions]) -> None:
    arguments = "serve --target /m --num-draft-tokens 3 --set verifier.cache_slots=8 --set verifier.dtype=float32"
    more = "--http-port 0 --host 0.0.0.0 --threads 1 --exit-timeout 3 --state-directory /s --verbose"
    assert cli.main([*arguments.split(), *more.split()]) == 0
    assert started == [
        ServerOptions(
            settings={"target": "/m", "num_draft_tokens": "3"},
            model_settings={"verifier": {"cache_slots": "8", "dtype": "float32"}},
            host="0.0.0.0",
            http_port=0,
            grpc_port=8001,
            metrics_port=8002,
            threads=1,
            exit_timeout_s=3,
            state_directory=Path("/s"),
            verbose=True,
        )
    ]


def test_every_option_for_a_setting_names_one() -> None:
    known = {name for settings in SETTINGS_BY_MODEL.values() for name in settings.model_fields}
    assert set(cli.SHARED_SETTINGS) <= known


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["--set", "verifier"], "MODEL.SETTING=VALUE"),
        (["--set", "cache_slots=3"], "MODEL.SETTING=VALUE"),
        (["--http-port", "70000"], r"70000 is not in 0\.\.65535"),
        (["--threads", "0"], "0 is not at least 1"),
    ],
)
def test_a_malformed_argument_is_a_usage_error(
    argument: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", *argument])
    assert stopped.value.code == 2
    assert message.replace("\\", "") in capsys.readouterr().err


def test_an_expected_failure_is_a_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve_model(_: str) -> str:
        raise SetupError("no registry in reach")

    monkeypatch.setattr(cli, "resolve_model", resolve_model)
    assert cli.main(["prepare"]) == 1
    assert capsys.readouterr().err == "adaptive-verification: no registry in reach\n"


def test_settings_prints_every_setting_of_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["settings"]) == 0
    table = capsys.readouterr().out
    for model, settings in SETTINGS_BY_MODEL.items():
        for name in settings.model_fields:
            assert f"| {model} | `{name}` |" in table


def test_a_signal_delivered_twice_counts_once_and_a_later_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    now = 100.0
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    signals.interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    now += 2 * signals.DUPLICATE_SIGNAL_S
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGINT](signal.SIGINT, None)

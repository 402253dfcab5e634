"""What the launcher refuses before it starts anything."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptive_verification.errors import SettingsError, SetupError
from adaptive_verification.serving import launcher, tritonserver
from adaptive_verification.serving.launcher import ServerOptions, running_server


@pytest.fixture
def options(tmp_path: Path) -> ServerOptions:
    (tmp_path / "models" / "verifier").mkdir(parents=True)
    (tmp_path / "models" / "verifier" / "config.pbtxt").write_text('name: "verifier" backend: "python"')
    return ServerOptions(model_repository=tmp_path / "models", state_directory=tmp_path / "state")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(launcher, "ServerProcess", start)
    monkeypatch.setattr(tritonserver, "find_tritonserver", lambda: None)
    monkeypatch.setattr(tritonserver, "find_libpython", lambda: None)


def start(options: ServerOptions, **changes: Any) -> None:
    with running_server(ServerOptions(**{**vars(options), **changes})):
        pass


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_in_use_is_refused_with_the_option_that_chooses_another(options: ServerOptions, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} of 127\.0\.0\.1 .*--{name.replace('_', '-')}"):
            start(options, **{name: port})


def test_free_ports_differ(options: ServerOptions) -> None:
    ports = launcher._choose_ports(options)
    assert len(set(ports)) == 3
    assert 0 not in ports


def test_a_wrong_setting_is_refused(options: ServerOptions) -> None:
    with pytest.raises(SettingsError, match="cache_slots='many'"):
        start(options, settings={"cache_slots": "many"})


def test_too_little_shared_memory_is_refused(options: ServerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(SetupError, match=r"1 MB free; 1 models need 4 MB .*--shm-size"):
        start(options)


def test_a_missing_model_is_refused(options: ServerOptions) -> None:
    with pytest.raises(SetupError, match="There is no directory /nowhere"):
        start(options, settings={"target": "/nowhere"})

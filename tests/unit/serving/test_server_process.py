"""The end of a server process and of everything it started, with a shell in the server's place."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from adaptive_verification.serving.server_process import ServerProcess


def shell(script: str, log: Path) -> ServerProcess:
    return ServerProcess(["/bin/sh", "-c", script], os.environ, log, verbose=False)


def ends(pid: int) -> bool:
    """Whether a process, not necessarily a child of ours, ends within half a minute."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 30)[0])
    finally:
        os.close(process)


def test_a_server_that_listens_ends_in_order(tmp_path: Path) -> None:
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    process = shell(f"trap 'echo unloading; exit 0' TERM; echo > {pipe}; while :; do :; done", tmp_path / "log")
    pipe.read_text()
    process.stop(timeout_s=30)
    assert process.describe_end() == "exit code 0"
    assert (tmp_path / "log").read_text() == "unloading\n"


def test_a_deaf_server_and_its_children_are_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    process = shell(f"trap '' TERM; sleep 1000 & echo $! > {pipe}; wait", tmp_path / "log")
    child = int(pipe.read_text())
    process.stop(timeout_s=0)
    assert process.describe_end() == "signal SIGKILL"
    assert ends(child)


def test_children_that_outlive_a_crashed_server_are_killed(tmp_path: Path) -> None:
    process = shell("sleep 1000 & echo $!; exit 3", tmp_path / "log")
    process.wait()
    assert process.has_ended
    process.stop(timeout_s=30)
    process.stop(timeout_s=30)  # again is harmless
    assert process.describe_end() == "exit code 3"
    assert ends(int((tmp_path / "log").read_text()))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs util-linux's setpriv")
def test_a_server_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    launcher = f"""
import os
from pathlib import Path
from adaptive_verification.serving.server_process import ServerProcess
command = ["/bin/sh", "-c", "echo $$ > {pipe}; exec sleep 1000"]
ServerProcess(command, os.environ, Path({str(tmp_path / "log")!r}), verbose=False).wait()
"""
    process = subprocess.Popen([sys.executable, "-c", launcher])
    server = int(pipe.read_text())
    process.kill()
    process.wait()
    assert ends(server)

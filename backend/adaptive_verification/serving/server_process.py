"""The tritonserver process with everything it starts: one process group, one log, one orderly end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptive_verification.serving.server_log import ServerLog


class ServerProcess:
    """A running server. Its Python stages are children in the same process group."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log_path: Path, *, verbose: bool) -> None:
        """Starts the server.

        Args:
            command: program and arguments.
            variables: its whole environment.
            log_path: file for its output.
            verbose: also show all of its output on standard error.
        """
        self._process = subprocess.Popen(
            [*_ending_with_its_parent(), *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A terminal's Ctrl-C must reach the launcher only, which then stops the server in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._log = ServerLog(self._process.stdout, log_path, verbose=verbose)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        """Returns when the server has ended by itself."""
        self._process.wait()

    def stop(self, timeout_s: float) -> None:
        """Asks the server to end, kills what is left after the timeout, and completes the log. May be called again.

        An exception from outside (a second Ctrl-C) cuts the wait short.
        """
        try:
            self._process.terminate()
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def describe_end(self) -> str:
        """How the server ended: its exit code, or the signal that ended it."""
        code = self._process.wait()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _ending_with_its_parent() -> list[str]:
    """A prefix that makes a program end when its parent does, however that ends; nothing where the tool is missing."""
    setpriv = shutil.which("setpriv")  # part of util-linux
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []

"""The server's log: kept whole in a file, shown as far as asked for, and searched for why a start failed."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import IO

from adaptive_verification import errors

TAIL_LINES = 25

# W1129 20:50:05.305365 5412 model.py:14] "message". Triton's own lines name a .cc file.
_STAGE_WARNING = re.compile(r"^[WE]\d{4} [\d:.]+ \d+ \S+\.py:\d+\]")
_FAILED_MODEL = re.compile(
    r"^E.*\] \"?(?:failed to load|Poll failed for model directory) "
    r"'(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.*?)\"?$"
)
_OUR_ERRORS = tuple(name for name in vars(errors) if name[0].isupper())


class ServerLog:
    """Reads the server's output in a thread of its own until the server closes it."""

    def __init__(self, output: IO[str], path: Path, *, verbose: bool) -> None:
        """Starts reading.

        Args:
            output: the server's standard output and error, as text.
            path: the log file; overwritten.
            verbose: show every line on standard error, not only the stages' own warnings and errors. (Triton itself
                logs a dozen of those on a healthy machine without a GPU.)
        """
        self.path = path
        self._output = output
        self._verbose = verbose
        path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self.path.open("w", buffering=1) as file:
            for line in self._output:
                file.write(line)
                if self._verbose or _STAGE_WARNING.match(line):
                    sys.stderr.write(line)

    def close(self) -> None:
        """Waits until everything is written; every process that could write must have ended."""
        self._thread.join()
        self._output.close()


def failure_reason(log: str) -> str:
    """Why a start failed: each model that did not load with its error, or else the end of the log."""
    lines = log.splitlines()
    failures = [failure for line in lines if (failure := _failed_model(line))]
    return "\n".join(dict.fromkeys(failures)) or "\n".join(lines[-TAIL_LINES:])


def _failed_model(line: str) -> str | None:
    match = _FAILED_MODEL.match(line)
    if match is None:
        return None
    reason = match["reason"].replace("\\n", "\n").removeprefix("Internal: ").strip()
    if reason.startswith(_OUR_ERRORS):
        # Raised on purpose and written for the user: neither the exception's name nor its place in the code helps.
        reason = reason.partition(": ")[2].partition("\n\nAt:\n")[0]
    elif reason.endswith("is not healthy."):
        reason += " Its process died while loading; was the machine out of memory?"
    return f"model {match['model']}: {reason}"

"""The files through which a recording is asked for, and comes back.

    record.json            the request {"id", "steps"}: while it is there the estimator records, up to so many folds
    recording-<id>.jsonl   what the estimator writes, a line for each step, and a last one saying why it ended

So a recording needs no restart, its size is bounded, a crash loses nothing, and whoever asked can watch it grow. Known
to both sides: `recording`, within the estimator, and the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adaptive_verification.errors import TraceError
from adaptive_verification.estimation.files import write_json

REQUEST_NAME = "record.json"
MAX_STEPS = 100_000
_ID = re.compile(r"[0-9a-f]{1,32}")


class RecordingRequest(NamedTuple):
    identity: str
    steps: int

    def write(self, directory: Path) -> None:
        """Asks the estimator that runs on the directory. An earlier request ends.

        Raises:
            OSError: it could not be written.
        """
        write_json(directory / REQUEST_NAME, {"id": self.identity, "steps": self.steps})

    @classmethod
    def read(cls, directory: Path) -> RecordingRequest | None:
        """What is asked for at present.

        Raises:
            OSError: it cannot be read.
            ValueError, KeyError, TypeError: it is no request.
        """
        try:
            content = json.loads((directory / REQUEST_NAME).read_text())
        except FileNotFoundError:
            return None
        request = cls(str(content["id"]), int(content["steps"]))
        if not (_ID.fullmatch(request.identity) and 1 <= request.steps <= MAX_STEPS):
            raise ValueError(f"id must be hexadecimal, steps 1 to {MAX_STEPS}")
        return request


def end_request(directory: Path) -> None:
    """Takes the request back, or marks it as served."""
    (directory / REQUEST_NAME).unlink(missing_ok=True)


def recording_path(directory: Path, identity: str) -> Path:
    """Where the estimator writes the recording of a request."""
    return directory / f"recording-{identity}.jsonl"


def remove_recordings(directory: Path) -> None:
    """Removes what interrupted recordings have left behind."""
    for path in directory.glob("recording-*.jsonl"):
        path.unlink(missing_ok=True)


def trace_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A recording's lines as a trace: see `trace`.

    Raises:
        TraceError: there is no step in it.
    """
    header: Mapping[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    refits: list[Mapping[str, Any]] = []
    for line in lines:
        if header is None:
            header = line
        elif "features" in line:
            width = header["num_speculative_tokens"]
            padded = {"features": _padded(line["features"], width, 0.0)}
            if "draft_features" in line:
                nothing = [0.0] * len(header["draft_features"])
                padded["draft_features"] = _padded(line["draft_features"], width, nothing)
            steps.append({**line, **padded})
        elif "after_steps" in line:
            refits.append(line)
    if header is None or not steps:
        raise TraceError("nothing was recorded")
    return {**header, "steps": steps, "coefficients": refits}


def whole_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines of a growing recording from a place on, as far as they are whole, and the place after them."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return [], start
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def _padded(rows: Sequence[Sequence[Any]], width: int, nothing: Any) -> list[list[Any]]:
    return [[*row, *[nothing] * (width - len(row))] for row in rows]

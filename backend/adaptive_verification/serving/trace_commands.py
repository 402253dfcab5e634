"""`adaptive-verification record` and `replay`: the estimator's evidence from a running server, and fits of it."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from adaptive_verification.errors import StateError, TraceError
from adaptive_verification.estimation.calibration import Calibration
from adaptive_verification.estimation.recording_files import (
    MAX_STEPS,
    RecordingRequest,
    end_request,
    recording_path,
    remove_recordings,
    trace_of,
    whole_lines,
)
from adaptive_verification.estimation.state import is_in_use
from adaptive_verification.serving.signals import interrupt_on_signals
from adaptive_verification.serving.state_commands import add_state_directory, chosen_directory

POLL_INTERVAL_S = 0.2
SILENCE_S = 2.0
"""After so long without a recorded step it is asked whether the server is there at all."""
_OVERRIDES = {
    "refit_interval": (int, "N", "steps between two refits"),
    "damping_observations": (float, "LABELS", "labels at which a refit moves half as far (damping_labels)"),
    "l2": (float, "RIDGE", "ridge of the Newton step"),
    "init_slope": (float, "W", "slope at the start"),
    "init_intercept": (float, "B", "intercepts at the start"),
    "feature": (str, "NAME", "feature made from the recorded log-odds, as in the setting `feature`"),
    "evidence": (str, "KIND", "none, or history (needs a trace made by `record`)"),
}
"""Constant of the trace -> type, placeholder and meaning of the option that overrides it."""


def add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="fit a recorded trace offline and print the coefficients",
        description="Feeds a trace to the estimator's own fit, from a cold start, and prints JSON: the coefficients "
        "after each refit. Without options it is fitted with the trace's own constants.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.json")
    for name, (kind, placeholder, meaning) in _OVERRIDES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=placeholder, help=meaning)
    parser.add_argument(
        "--calibration",
        action="store_true",
        help="print an object instead, with `coefficients` and the `calibration` of the predictions made on the way",
    )
    parser.set_defaults(run=_replay)


def _replay(parsed: argparse.Namespace) -> None:
    from adaptive_verification.estimation.trace import Trace, TraceConstants, replay  # torch takes seconds to import

    trace = Trace.read(parsed.trace)
    overrides = {name: value for name in _OVERRIDES if (value := getattr(parsed, name)) is not None}
    try:
        constants = TraceConstants.model_validate(trace.constants.model_dump() | overrides)
    except ValueError as error:
        raise TraceError(str(error)) from None
    result = replay(trace, constants)
    output: Any = result.coefficients
    if parsed.calibration:
        output = {"coefficients": output, "calibration": _calibration(result.calibration, trace.num_positions)}
    print(json.dumps(output, indent=1))


def _calibration(calibration: Calibration, num_positions: int) -> dict[str, Any]:
    by_position = [asdict(calibration.report(position)) for position in range(num_positions)]
    return {**asdict(calibration.report()), "positions": by_position}


def add_record(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "record",
        help="record a trace for `replay` from a running server",
        description="Asks the server that runs on the state directory for its estimator's evidence, waits for it, and "
        "writes it as a trace. Ctrl-C ends the recording and keeps what there is. Without a server it waits for one; "
        "a trace that begins with a cold server replays to that server's coefficients.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.json")
    parser.add_argument("--steps", type=_steps, default=2000, metavar="N", help="decode steps to record (2000)")
    add_state_directory(parser)
    parser.set_defaults(run=_record)


def _steps(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{number} is not in 1..{MAX_STEPS}")
    return number


def _record(parsed: argparse.Namespace) -> None:
    interrupt_on_signals()
    directory = chosen_directory(parsed)
    if parsed.trace.is_dir() or not parsed.trace.absolute().parent.is_dir():
        raise TraceError(f"{parsed.trace} cannot be written: there is no such directory, or it is one")
    try:
        with FileLock(directory / "record.lock", timeout=0):
            lines = _recorded_lines(directory, parsed.steps)
    except Timeout:
        raise StateError(f"somebody else is recording from {directory}") from None
    except OSError as error:
        raise StateError(f"nothing can be recorded through {directory}: {error}") from None
    trace = trace_of(lines)
    parsed.trace.write_text(json.dumps(trace))
    ended = lines[-1].get("ended", "interrupted")
    print(f"{len(trace['steps'])} steps are in {parsed.trace} (the recording ended: {ended})")
    if not trace["cold_start"]:
        print("The fit had begun before, so a replay, which starts cold, gives other coefficients than the server's.")


def _recorded_lines(directory: Path, steps: int) -> list[dict[str, Any]]:
    """Asks for a recording and reads along until it ends, by itself, with the server, or by Ctrl-C."""
    remove_recordings(directory)
    identity = secrets.token_hex(8)
    path = recording_path(directory, identity)
    lines: list[dict[str, Any]] = []
    try:
        RecordingRequest(identity, steps).write(directory)
        with tqdm(total=steps, unit="step", desc="recording") as progress:
            _read_along(directory, path, lines, progress)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
    finally:
        end_request(directory)
        path.unlink(missing_ok=True)
    return lines


def _read_along(directory: Path, path: Path, lines: list[dict[str, Any]], progress: tqdm[Any]) -> None:
    read_to, heard_at, told = 0, time.monotonic(), False
    while not (lines and "ended" in lines[-1]):
        new_lines, read_to = whole_lines(path, read_to)
        lines += new_lines
        progress.update(sum("features" in line for line in new_lines))
        now = time.monotonic()
        if new_lines:
            heard_at = now
        elif now - heard_at > SILENCE_S:
            heard_at = now
            if not is_in_use(directory):
                if lines:
                    return  # the server is gone, and what it wrote is read
                if not told:
                    told = True
                    progress.write(f"No server is running on {directory}; waiting for one.", file=sys.stderr)
        time.sleep(POLL_INTERVAL_S)

"""`adaptive-verification state`: shows, sets aside, exports and imports what an estimator has learned.

Reading is always possible: the file is replaced in one move. What changes the file is refused while a server runs on
the directory, because that server would overwrite it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import Timeout

from adaptive_verification.errors import SettingsError, StateError
from adaptive_verification.estimation.state import FILE_NAME, KeptState, is_in_use, set_aside, state_lock
from adaptive_verification.serving import environment
from adaptive_verification.settings import EstimatorSettings

if TYPE_CHECKING:
    from adaptive_verification.estimation.stage import EstimatorStage


def add_state(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand and its own subcommands."""
    parser = commands.add_parser("state", help="show, reset, export or import what the estimator has learned")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    directory = argparse.ArgumentParser(add_help=False)
    add_state_directory(directory)

    show = actions.add_parser("show", parents=[directory], help="print coefficients, counts, calibration and costs")
    show.add_argument("--png", type=Path, metavar="FILE", help="draw them too (needs matplotlib)")
    show.set_defaults(run=_show)

    reset = actions.add_parser("reset", parents=[directory], help="set the state aside, so the next start is cold")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    reset.set_defaults(run=_reset)

    export = actions.add_parser("export", parents=[directory], help="copy the state, after checking it, to a file")
    export.add_argument("file", type=Path, metavar="FILE")
    export.set_defaults(run=_export)

    import_ = actions.add_parser(
        "import", parents=[directory], help="put an exported state in place, after checking it"
    )
    import_.add_argument("file", type=Path, metavar="FILE")
    import_.add_argument("--force", action="store_true", help="also where the present state is another deployment's")
    import_.set_defaults(run=_import)


def add_state_directory(parser: argparse.ArgumentParser) -> None:
    """The option that every command on a state directory has."""
    parser.add_argument(
        "--state-directory",
        type=Path,
        metavar="DIR",
        help="the server's (default: as of `serve`, from the environment)",
    )


def chosen_directory(parsed: argparse.Namespace) -> Path:
    """The state directory that the arguments name."""
    return parsed.state_directory or environment.state_directory()


def restored_stage(path: Path) -> tuple[KeptState, EstimatorStage]:
    """The state of a file, and an estimator that it is restored into: the check that a server would make.

    Raises:
        StateError: there is no file, or it is damaged.
    """
    from adaptive_verification.estimation.stage import EstimatorStage  # torch takes seconds to import

    try:
        kept = KeptState.read(path)
        stage = EstimatorStage(EstimatorSettings.model_validate(kept.fingerprint))
        stage.load_state_dict(kept.state)
    except FileNotFoundError:
        raise StateError(f"there is no kept state at {path}") from None
    except (StateError, SettingsError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is damaged: {error!r}") from None
    return kept, stage


def _show(parsed: argparse.Namespace) -> None:
    from adaptive_verification.serving.state_plot import draw_state
    from adaptive_verification.serving.state_table import state_table

    path = chosen_directory(parsed) / FILE_NAME
    kept, stage = restored_stage(path)
    running = "; a server is running on it, so this is as of its last refit" if is_in_use(path.parent) else ""
    print(f"{path}{running}\n\n{state_table(kept.fingerprint, stage)}")
    if parsed.png is not None:
        draw_state(kept.fingerprint, stage, parsed.png)
        print(f"\nDrawn to {parsed.png}")


def _reset(parsed: argparse.Namespace) -> None:
    path = chosen_directory(parsed) / FILE_NAME
    if not path.exists():
        raise StateError(f"there is no kept state at {path}")
    with _changing(path.parent):
        if not (parsed.yes or _confirmed(f"Set {path} aside? The next start is cold. [y/N] ")):
            raise StateError("nothing was changed")
        print(f"The state is now in {set_aside(path, 'reset')}")


def _export(parsed: argparse.Namespace) -> None:
    kept, _ = restored_stage(chosen_directory(parsed) / FILE_NAME)
    _write(kept, parsed.file)
    print(f"Exported to {parsed.file}")


def _import(parsed: argparse.Namespace) -> None:
    kept, _ = restored_stage(parsed.file)
    path = chosen_directory(parsed) / FILE_NAME
    with _changing(path.parent):
        replaced = None
        if path.exists():
            if not parsed.force:
                _refuse_other_fingerprint(kept, path)
            replaced = set_aside(path, "replaced")
        _write(kept, path)
    print(f"Imported to {path}" + (f"; what was there is now in {replaced}" if replaced else ""))


def _refuse_other_fingerprint(kept: KeptState, path: Path) -> None:
    """Raises StateError where the file in place says that it is of other settings than the state to import."""
    present = KeptState.read(path).fingerprint
    differences = [
        f"{name} is {present.get(name)!r} there and {kept.fingerprint.get(name)!r} here"
        for name in sorted({*present, *kept.fingerprint})
        if present.get(name) != kept.fingerprint.get(name)
    ]
    if differences:
        raise StateError(f"{path} is another deployment's state ({'; '.join(differences)}); --force replaces it")


@contextmanager
def _changing(directory: Path) -> Iterator[None]:
    """Holds the directory's lock.

    Raises:
        StateError: a server is running on it, or it cannot be changed.
    """
    try:
        with state_lock(directory).acquire(timeout=0):
            yield
    except Timeout:
        raise StateError(f"a server is running on {directory}; stop it first, or it would overwrite this") from None
    except OSError as error:
        raise StateError(f"{directory} cannot be changed: {error}") from None


def _write(kept: KeptState, path: Path) -> None:
    try:
        kept.write(path)
    except OSError as error:
        raise StateError(f"{path} cannot be written: {error}") from None


def _confirmed(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        raise StateError("nobody answers; say --yes")
    return answer.strip().lower() in ("y", "yes")

"""What the estimator has learned, kept in the state directory across restarts.

One readable JSON file. It belongs to a pair, a depth, a feature and an acceptance method (its fingerprint). A file that
is damaged, or another fingerprint's, is set aside with a warning and the estimator starts cold: never a failed start,
and never a failed step because a disk is full.

Whoever changes the file holds the directory's lock: an estimator for as long as it runs, the command line for a moment.
An estimator that finds it taken reads the file, but writes only from the moment that the lock is free.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from adaptive_verification.errors import StateError
from adaptive_verification.estimation.files import write_json

logger = logging.getLogger(__name__)

FILE_NAME = "estimator.json"
LOCK_NAME = "estimator.lock"
FORMAT = 1


@dataclass(frozen=True)
class KeptState:
    """A state file's content. Whether the state can be restored is known only when that is tried."""

    fingerprint: Mapping[str, Any]
    """What the state belongs to: names and values of settings."""
    state: Mapping[str, Any]

    def write(self, path: Path) -> None:
        """Replaces the file in one move.

        Raises:
            OSError, ValueError: as `files.write_json`.
        """
        write_json(path, {"format": FORMAT, "fingerprint": self.fingerprint, "state": self.state})

    @classmethod
    def read(cls, path: Path) -> KeptState:
        """The inverse of `write`.

        Raises:
            FileNotFoundError: there is none.
            StateError: it cannot be read, or it is not one.
        """
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise StateError(f"{path} has format {content['format']!r}; it must be {FORMAT}")
            return cls(dict(content["fingerprint"]), dict(content["state"]))
        except (FileNotFoundError, StateError):
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is no kept state: {error!r}") from None


def state_lock(directory: str | os.PathLike[str]) -> FileLock:
    """The lock of whoever changes the state there. It goes with the process that holds it."""
    return FileLock(Path(directory) / LOCK_NAME, thread_local=False)


def is_in_use(directory: str | os.PathLike[str]) -> bool:
    """Whether an estimator is running on the directory."""
    if not (Path(directory) / LOCK_NAME).exists():
        return False
    try:
        with state_lock(directory).acquire(timeout=0):
            return False
    except Timeout:
        return True


def set_aside(path: Path, kind: str) -> Path:
    """Renames a state file, so that it is no longer used; returns where it is now.

    Raises:
        OSError: it could not be renamed.
    """
    aside = path.with_name(f"{path.stem}.{kind}{path.suffix}")
    path.replace(aside)
    return aside


class StateFile:
    """The state of one running estimator on disk.

    Args:
        directory: made where it is missing.
        fingerprint: what the state belongs to.
    """

    def __init__(self, directory: str | os.PathLike[str], fingerprint: Mapping[str, Any]) -> None:
        self.path = Path(directory) / FILE_NAME
        self._fingerprint = dict(fingerprint)
        self._lock = state_lock(directory)
        self._warned_of_other = False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="estimator-state")
        self._pending: Future[None] | None = None

    def load(self, restore: Callable[[Mapping[str, Any]], None]) -> bool:
        """Hands the kept state to `restore`; returns whether there was one that fits.

        `restore` raises ValueError, KeyError or TypeError where the state is not what it expects.
        """
        owned = self._own()
        try:
            kept = KeptState.read(self.path)
        except FileNotFoundError:
            return False
        except StateError as error:
            return self._refuse("damaged", str(error), owned)
        if kept.fingerprint != self._fingerprint:
            return self._refuse("foreign", f"it is of {kept.fingerprint}, this is {self._fingerprint}", owned)
        try:
            restore(kept.state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return self._refuse("damaged", repr(error), owned)
        return True

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes the state now, unless another estimator owns the directory. A disk that refuses is a warning."""
        if not self._own():
            return
        try:
            KeptState(self._fingerprint, state).write(self.path)
        except (OSError, ValueError) as error:
            logger.warning("the estimator's state could not be written to %s: %s", self.path, error)

    def save_soon(self, state: Mapping[str, Any]) -> None:
        """Writes the state beside the steps; skipped while an earlier one is still being written."""
        if self._pending is None or self._pending.done():
            self._pending = self._writer.submit(self.save, state)

    def close(self, state: Mapping[str, Any]) -> None:
        """Writes the last state, ends the writer and gives the directory free."""
        self._writer.shutdown(wait=True)
        self.save(state)
        self._lock.release(force=True)

    def _own(self) -> bool:
        """Takes the directory's lock where it is free. A place where nothing can be locked counts as our own."""
        if self._lock.is_locked:
            return True
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            if not self._warned_of_other:
                self._warned_of_other = True
                logger.warning("%s is in use by another server; until that ends, nothing is kept", self.path.parent)
            return False
        except (OSError, NotImplementedError) as error:
            logger.warning("%s cannot be locked: %s", self.path.parent, error)
        return True

    def _refuse(self, kind: str, reason: str, owned: bool) -> bool:
        logger.warning("%s is %s and not used; starting cold: %s", self.path, kind, reason)
        if owned:
            try:
                logger.warning("%s is set aside as %s", self.path, set_aside(self.path, kind))
            except OSError as error:
                logger.warning("%s could not be set aside: %s", self.path, error)
        return False

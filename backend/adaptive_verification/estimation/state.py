"""What the estimator has learned, kept in the state directory across restarts.

One readable JSON file. It belongs to a pair, a depth, a feature and an acceptance method (its fingerprint). A file that
is damaged, or another fingerprint's, is set aside with a warning and the estimator starts cold: never a failed start,
and never a failed step because a disk is full.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from adaptive_verification.estimation.files import write_json

logger = logging.getLogger(__name__)

FILE_NAME = "estimator.json"
FORMAT = 1


class StateFile:
    """The state of one estimator on disk.

    Args:
        directory: made where it is missing.
        fingerprint: what the state belongs to.
    """

    def __init__(self, directory: str | os.PathLike[str], fingerprint: Mapping[str, Any]) -> None:
        self.path = Path(directory) / FILE_NAME
        self._fingerprint = dict(fingerprint)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="estimator-state")
        self._pending: Future[None] | None = None

    def load(self, restore: Callable[[Mapping[str, Any]], None]) -> bool:
        """Hands the kept state to `restore`; returns whether there was one that fits.

        `restore` raises ValueError, KeyError or TypeError where the state is not what it expects.
        """
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return False
        except (OSError, UnicodeDecodeError) as error:
            return self._set_aside("damaged", str(error))
        try:
            content = json.loads(text)
            if content["format"] != FORMAT or content["fingerprint"] != self._fingerprint:
                return self._set_aside("foreign", f"it is of {content['fingerprint']}, this is {self._fingerprint}")
            restore(content["state"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return self._set_aside("damaged", repr(error))
        return True

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes the state now. A disk that refuses is a warning."""
        try:
            write_json(self.path, {"format": FORMAT, "fingerprint": self._fingerprint, "state": state})
        except (OSError, ValueError) as error:
            logger.warning("the estimator's state could not be written to %s: %s", self.path, error)

    def save_soon(self, state: Mapping[str, Any]) -> None:
        """Writes the state beside the steps; skipped while an earlier one is still being written."""
        if self._pending is None or self._pending.done():
            self._pending = self._writer.submit(self.save, state)

    def close(self, state: Mapping[str, Any]) -> None:
        """Writes the last state and ends the writer."""
        self._writer.shutdown(wait=True)
        self.save(state)

    def _set_aside(self, kind: str, reason: str) -> bool:
        aside = self.path.with_name(f"{self.path.stem}.{kind}{self.path.suffix}")
        logger.warning("%s is %s and set aside as %s; starting cold: %s", self.path, kind, aside.name, reason)
        try:
            self.path.replace(aside)
        except OSError as error:
            logger.warning("%s could not be set aside: %s", self.path, error)
        return False

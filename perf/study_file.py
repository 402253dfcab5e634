"""What a study's folder belongs to, on disk: a study that was interrupted goes on, but only as the same study.

Numbers of different work must not stand in one table.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adaptive_verification.errors import AdaptiveVerificationError, SetupError
from adaptive_verification.serving.signals import interrupt_on_signals


class StudyFile:
    """`study.json` in a study's folder, which is made where it is missing.

    Args:
        directory: the folder.
        study: names and values that everything in it must have in common.

    Raises:
        SetupError: what is there belongs to another study.
    """

    def __init__(self, directory: Path, study: Mapping[str, Any]) -> None:
        self._path = directory / "study.json"
        directory.mkdir(parents=True, exist_ok=True)
        self.provenance: list[str] = []
        """Of every run that added something."""
        self._study = json.loads(json.dumps(study))  # as it is read back
        if self._path.exists():
            content = json.loads(self._path.read_text())
            self._refuse_other(content["study"])
            self.provenance = content["provenance"]

    def begin_run(self, provenance: str) -> None:
        """Before a run adds something."""
        if provenance not in self.provenance:
            self.provenance.append(provenance)
        content = {"study": self._study, "provenance": self.provenance}
        self._path.write_text(json.dumps(content, indent=1) + "\n")

    def _refuse_other(self, present: Mapping[str, Any]) -> None:
        for name in self._study.keys() | present.keys():
            there, asked = present.get(name), self._study.get(name)
            if there != asked:
                raise SetupError(
                    f"{self._path.parent} was measured with {name}={there}; this study has {asked}. "
                    "Name another --output, or delete the folder."
                )


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Around a study: a signal ends it in order, also in the background; errors are one line."""
    interrupt_on_signals()
    try:
        yield
    except AdaptiveVerificationError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")

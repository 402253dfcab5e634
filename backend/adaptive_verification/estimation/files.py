"""Files that are whole or not there: what a crash or a full disk leaves behind can always be read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Replaces `path` by the payload in one move, after it is on the disk. Numbers must be finite.

    Raises:
        OSError: it could not be written; what was there before is unharmed.
        ValueError: a number is not finite.
    """
    text = json.dumps(payload, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)  # the rename itself must reach the disk
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""What is expected of a drafter before it was ever seen at work: from a file beside its weights, where it has one.

`train-drafter` fits it on held-out text. Without a file the fit starts from general constants and explores until it has
learned; with one it starts about where it would end, so a fresh server need not pay for finding that out.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptive_verification.estimation.files import write_json

logger = logging.getLogger(__name__)

FILE_NAME = "acceptance.json"
_FORMAT = 1


@dataclass(frozen=True)
class FirstGuess:
    """How acceptance follows from `logit_q_max`, and how frequent it is. Positions beyond the last are like it."""

    slope: float
    intercepts: Sequence[float]
    """By position."""
    mean_acceptance: Sequence[float]
    """By position, of drafts whose predecessors were accepted."""

    def __post_init__(self) -> None:
        """Raises ValueError: a number is out of range, or missing."""
        numbers = (self.slope, *self.intercepts, *self.mean_acceptance)
        if not self.intercepts or not self.mean_acceptance or not all(map(math.isfinite, numbers)):
            raise ValueError("slope, intercepts and mean_acceptance must be finite numbers, at least one of each")
        if self.slope < 0 or not all(0 <= mean <= 1 for mean in self.mean_acceptance):
            raise ValueError("slope must be at least 0, mean_acceptance within 0 and 1")

    def write(self, directory: Path) -> None:
        """Writes it into a drafter's directory."""
        payload = {
            "format": _FORMAT,
            "feature": "logit_q_max",
            "slope": self.slope,
            "intercepts": list(self.intercepts),
            "mean_acceptance": list(self.mean_acceptance),
        }
        write_json(directory / FILE_NAME, payload)


def read_first_guess(drafter: str) -> FirstGuess | None:
    """Of the drafter in that directory; None where it has none, or (with a warning) one that cannot be used."""
    path = Path(drafter) / FILE_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"format is {content['format']!r}; it must be {_FORMAT}")
        return FirstGuess(
            float(content["slope"]), tuple(map(float, content["intercepts"])),
            tuple(map(float, content["mean_acceptance"])),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used and is ignored: %r", path, error)
        return None


def by_position(values: Sequence[float], num_positions: int) -> list[float]:
    """So many values; the last one again for positions that have none."""
    return [*values[:num_positions], *[values[-1]] * (num_positions - len(values))]

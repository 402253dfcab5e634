"""Measurements on disk: a CSV that grows by a line per measurement, and beside it the study that they belong to."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from adaptive_verification.errors import SetupError
from perf.load_plan import Point
from perf.study_file import StudyFile


@dataclass(frozen=True)
class Measurement:
    """One window as the server counted it."""

    sampling: str
    concurrency: int
    arm: str
    repeat: int
    window: int
    seconds: float
    tokens: int
    """Output tokens of all requests together; those after an answer's end are among them."""
    steps: int
    prompt_tokens: int
    first_tokens: int
    """Requests that got their first token in it."""
    first_tokens_ms: float
    """How long they had waited for it, summed up."""
    drafted_tokens: int
    admitted_tokens: int
    accepted_tokens: int
    measured_at: str
    """ISO 8601, UTC."""

    @property
    def point(self) -> Point:
        return Point(self.sampling, self.concurrency, self.arm, self.repeat, self.window)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def sequence_steps(self) -> int:
        """How often a step gave a sequence tokens: its accepted drafts and one more."""
        return self.tokens - self.accepted_tokens

    @property
    def time_to_first_token_ms(self) -> float:
        """From a request's arrival, in the mean."""
        return self.first_tokens_ms / self.first_tokens if self.first_tokens else math.nan

    @property
    def time_per_output_token_ms(self) -> float:
        """Of one request after its first token, in the mean: a step's time over the tokens that it gives a sequence."""
        return 1e3 * self.seconds / self.steps * self.sequence_steps / self.tokens


M = TypeVar("M")


class ResultsDirectory(Generic[M]):
    """A study's folder.

    Args:
        path: made where it is missing.
        study: names and values that all measurements there must have in common.
        kind: the measurements', a dataclass of text and numbers.
        file_name: of the CSV.

    Raises:
        SetupError: what is there was measured with others, or cannot be read.
    """

    def __init__(self, path: Path, study: Mapping[str, Any], kind: type[M], file_name: str) -> None:
        self.path = path
        self.study_file = StudyFile(path, study)
        self._kind: Any = kind
        self._csv = path / file_name
        self.measurements = self._read()

    def add(self, measurement: M) -> None:
        """Writes it before it returns."""
        is_new = not self._csv.exists()
        values = dataclasses.asdict(measurement)  # type: ignore[call-overload]  # M is a dataclass
        with self._csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(values), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(
                {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in values.items()}
            )
        self.measurements.append(measurement)

    def _read(self) -> list[M]:
        if not self._csv.exists():
            return []
        types = get_type_hints(self._kind)
        try:
            with self._csv.open(newline="") as file:
                return [
                    self._kind(**{name: types[name](value) for name, value in row.items()})
                    for row in csv.DictReader(file)
                ]
        except (KeyError, TypeError, ValueError) as error:
            raise SetupError(f"{self._csv} cannot be read ({error!r}); delete it, or name another --output") from None

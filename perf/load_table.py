"""The load study's measurements as medians, ratios and Markdown tables. Pure functions of the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from perf.load_plan import ADAPTIVE, ADAPTIVE_COLD, ARMS, NO_SPECULATION
from perf.load_results import Measurement


class Spread(NamedTuple):
    """A number over the repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def format(self, decimals: int) -> str:
        """`median (least-most)`, or the number alone where there is no spread."""
        if self.least == self.most:
            return f"{self.median:.{decimals}f}"
        return f"{self.median:.{decimals}f} ({self.least:.{decimals}f}-{self.most:.{decimals}f})"


class Cell(NamedTuple):
    """What is compared: one arm under one load."""

    sampling: str
    concurrency: int
    arm: str


Cells = dict[Cell, list[Measurement]]
"""The repeats of each cell."""


def cells_of(measurements: Iterable[Measurement]) -> Cells:
    """Measurements by cell; the arms in the order of `ARMS`, the loads rising."""
    arms = list(ARMS)
    cells: Cells = {}
    for measurement in sorted(measurements, key=lambda m: (m.sampling, m.concurrency, arms.index(m.arm), m.repeat)):
        cells.setdefault(Cell(*measurement.point[:3]), []).append(measurement)
    return cells


def tokens_per_second(cells: Cells, cell: Cell) -> float:
    """Of all requests together, median over the repeats."""
    return statistics.median(repeat.tokens_per_second for repeat in cells[cell])


def throughput_ratio(cells: Cells, sampling: str, concurrency: int, arm: str, baseline: str) -> Spread | None:
    """Tokens/s of one arm over another's, repeat by repeat; None where they have no repeat in common.

    Within a repeat the two were measured near each other, so a slow spell of the machine cancels out.
    """
    numerators, denominators = (
        {repeat.repeat: repeat.tokens_per_second for repeat in cells.get(Cell(sampling, concurrency, name), ())}
        for name in (arm, baseline)
    )
    ratios = [numerators[repeat] / denominators[repeat] for repeat in numerators.keys() & denominators.keys()]
    return Spread.of(ratios) if ratios else None


def best_arm(cells: Cells, sampling: str, concurrency: int, among: Callable[[str], bool]) -> str | None:
    """The arm with the most tokens/s (median) at one load, of those that `among` allows; None where it allows none."""
    candidates = [cell for cell in cells if cell[:2] == (sampling, concurrency) and among(cell.arm)]
    best = max(candidates, key=lambda cell: tokens_per_second(cells, cell), default=None)
    return None if best is None else best.arm


def is_other_arm(arm: str) -> bool:
    """Whether adaptive verification is compared with it."""
    return arm not in (ADAPTIVE, ADAPTIVE_COLD)


def is_fixed_arm(arm: str) -> bool:
    """Whether it always drafts and verifies the same number of tokens."""
    return ARMS[arm].is_fixed


def loads(cells: Cells) -> list[tuple[str, int]]:
    """(sampling, concurrency) of all cells, in order, once each."""
    return list(dict.fromkeys((cell.sampling, cell.concurrency) for cell in cells))


def markdown(measurements: Iterable[Measurement]) -> str:
    """All tables."""
    cells = cells_of(measurements)
    return "\n".join([*_ratio_table(cells), "", _LEGEND, "", *_cell_table(cells)])


_LEGEND = (
    "Median over the repeats (least-most). Ratios are taken repeat by repeat, of output tokens per second. TTFT: time "
    "to the first token; TPOT: time per output token after it. Drafted, admitted, accepted: tokens per sequence and "
    "step; tokens/step: tokens that a step gives a sequence (acceptance length)."
)


def _ratio_table(cells: Cells) -> list[str]:
    lines = _header("sampling", "requests", "best other arm", "its tokens/s", "AV tokens/s", "AV / best other",
                    "AV / no speculation", "AV cold / AV")  # fmt: skip
    for sampling, concurrency in loads(cells):
        best = best_arm(cells, sampling, concurrency, is_other_arm)
        if best is None or Cell(sampling, concurrency, ADAPTIVE) not in cells:
            continue
        ratios = [
            throughput_ratio(cells, sampling, concurrency, arm, baseline)
            for arm, baseline in ((ADAPTIVE, best), (ADAPTIVE, NO_SPECULATION), (ADAPTIVE_COLD, ADAPTIVE))
        ]
        lines.append(
            _row(
                sampling,
                concurrency,
                best,
                f"{tokens_per_second(cells, Cell(sampling, concurrency, best)):.1f}",
                f"{tokens_per_second(cells, Cell(sampling, concurrency, ADAPTIVE)):.1f}",
                *("" if ratio is None else ratio.format(3) for ratio in ratios),
            )
        )
    return lines


def _cell_table(cells: Cells) -> list[str]:
    lines = _header("sampling", "requests", "arm", "repeats", "tokens/s", "TTFT ms", "TPOT ms", "tokens/step",
                    "drafted", "admitted", "accepted")  # fmt: skip
    for cell, repeats in cells.items():
        columns: list[tuple[Callable[[Measurement], float], int]] = [
            (lambda m: m.tokens_per_second, 1),
            (lambda m: m.time_to_first_token_ms, 0),
            (lambda m: m.time_per_output_token_ms, 1),
            (lambda m: m.decoded_tokens / m.sequence_steps, 3),
            (lambda m: m.drafted_tokens / m.sequence_steps, 2),
            (lambda m: m.admitted_tokens / m.sequence_steps, 2),
            (lambda m: m.accepted_tokens / m.sequence_steps, 3),
        ]
        values = (Spread.of([of(repeat) for repeat in repeats]).format(decimals) for of, decimals in columns)
        lines.append(_row(*cell, len(repeats), *values))
    return lines


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"

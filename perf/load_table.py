"""The load study's measurements as medians, ratios and Markdown tables. Pure functions of the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from perf.load_plan import ADAPTIVE, ADAPTIVE_COLD, ARMS, NO_SPECULATION, NO_SPECULATION_COLD
from perf.load_results import Measurement


class Spread(NamedTuple):
    """A number over the rounds."""

    median: float
    lower_quartile: float
    upper_quartile: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))

    def format(self, decimals: int) -> str:
        """`median (quartile-quartile)`, or the number alone where there is no spread."""
        if self.lower_quartile == self.upper_quartile:
            return f"{self.median:.{decimals}f}"
        return f"{self.median:.{decimals}f} ({self.lower_quartile:.{decimals}f}-{self.upper_quartile:.{decimals}f})"


class Cell(NamedTuple):
    """What is compared: one arm under one load."""

    sampling: str
    concurrency: int
    arm: str


Cells = dict[Cell, list[Measurement]]
"""The windows of each cell."""


def cells_of(measurements: Iterable[Measurement]) -> Cells:
    """Measurements by cell; the arms in the order of `ARMS`, the loads rising."""
    arms = list(ARMS)
    cells: Cells = {}
    for measurement in sorted(measurements, key=lambda m: (m.sampling, m.concurrency, arms.index(m.arm), m.point)):
        cells.setdefault(Cell(*measurement.point[:3]), []).append(measurement)
    return cells


def tokens_per_second(cells: Cells, cell: Cell) -> float:
    """Of all requests together, median over the windows."""
    return statistics.median(window.tokens_per_second for window in cells[cell])


def throughput_ratio(cells: Cells, sampling: str, concurrency: int, arm: str, baseline: str) -> Spread | None:
    """Tokens/s of one arm over another's, round by round; None where they have no round in common.

    Within a round the two were measured near each other, so a slow spell of the machine cancels out.
    """
    numerators, denominators = (
        {(w.repeat, w.window): w.tokens_per_second for w in cells.get(Cell(sampling, concurrency, name), ())}
        for name in (arm, baseline)
    )
    ratios = [numerators[number] / denominators[number] for number in numerators.keys() & denominators.keys()]
    return Spread.of(ratios) if ratios else None


def best_arm(cells: Cells, sampling: str, concurrency: int, among: Callable[[str], bool]) -> str | None:
    """The arm with the most tokens/s (median) at one load, of those that `among` allows; None where it allows none."""
    candidates = [cell for cell in cells if cell[:2] == (sampling, concurrency) and among(cell.arm)]
    best = max(candidates, key=lambda cell: tokens_per_second(cells, cell), default=None)
    return None if best is None else best.arm


def is_other_arm(arm: str) -> bool:
    """Whether adaptive verification is compared with it."""
    return arm != ADAPTIVE and not ARMS[arm].cold


def is_fixed_arm(arm: str) -> bool:
    """Whether it always drafts and verifies the same number of tokens."""
    return ARMS[arm].is_fixed


def loads(cells: Cells) -> list[tuple[str, int]]:
    """(sampling, concurrency) of all cells, in order, once each."""
    return list(dict.fromkeys((cell.sampling, cell.concurrency) for cell in cells))


def markdown(measurements: Iterable[Measurement]) -> str:
    """All tables."""
    cells = cells_of(measurements)
    return "\n".join([*_ratio_table(cells), "", *_cold_table(cells), _LEGEND, "", *_cell_table(cells)])


_LEGEND = (
    "Median over the rounds (quartiles). Ratios are taken round by round, of output tokens per second, between windows "
    "of the same work. Cold: the first tokens with nothing learned, from an idle server on. TTFT, TPOT: mean time "
    "from a request to its first token, and per output token after it. Drafted, admitted, accepted: tokens per "
    "sequence and step; tokens/step: tokens that a step gives a sequence (acceptance length)."
)


def _ratio_table(cells: Cells) -> list[str]:
    lines = _header("sampling", "requests", "rounds", "best other arm", "its tokens/s", "AV tokens/s",
                    "AV / best other", "AV / no speculation")  # fmt: skip
    for sampling, concurrency in loads(cells):
        best = best_arm(cells, sampling, concurrency, is_other_arm)
        over_best = best and throughput_ratio(cells, sampling, concurrency, ADAPTIVE, best)
        if not best or not over_best:
            continue
        over_none = throughput_ratio(cells, sampling, concurrency, ADAPTIVE, NO_SPECULATION)
        lines.append(
            _row(
                sampling,
                concurrency,
                over_best.rounds,
                best,
                f"{tokens_per_second(cells, Cell(sampling, concurrency, best)):.1f}",
                f"{tokens_per_second(cells, Cell(sampling, concurrency, ADAPTIVE)):.1f}",
                over_best.format(3),
                over_none.format(3) if over_none else "",
            )
        )
    return lines


def _cold_table(cells: Cells) -> list[str]:
    lines = []
    for sampling, concurrency in loads(cells):
        ratio = throughput_ratio(cells, sampling, concurrency, ADAPTIVE_COLD, NO_SPECULATION_COLD)
        if ratio:
            lines.append(_row(sampling, concurrency, ratio.rounds, ratio.format(3)))
    return [*_header("sampling", "requests", "rounds", "AV cold / no speculation cold"), *lines, ""] if lines else []


def _cell_table(cells: Cells) -> list[str]:
    lines = _header("sampling", "requests", "arm", "windows", "tokens/s", "TTFT ms", "TPOT ms", "tokens/step",
                    "drafted", "admitted", "accepted")  # fmt: skip
    for cell, windows in cells.items():
        columns: list[tuple[Callable[[Measurement], float], int]] = [
            (lambda m: m.tokens_per_second, 1),
            (lambda m: m.time_to_first_token_ms, 0),
            (lambda m: m.time_per_output_token_ms, 1),
            (lambda m: m.tokens / m.sequence_steps, 3),
            (lambda m: m.drafted_tokens / m.sequence_steps, 2),
            (lambda m: m.admitted_tokens / m.sequence_steps, 2),
            (lambda m: m.accepted_tokens / m.sequence_steps, 3),
        ]
        values = (Spread.of([of(window) for window in windows]).format(decimals) for of, decimals in columns)
        lines.append(_row(*cell, len(windows), *values))
    return lines


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"

"""The load study as pictures: throughput against the best fixed number of drafts, and against interactivity."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from perf.load_plan import ADAPTIVE, ARMS, NO_SPECULATION
from perf.load_results import Measurement
from perf.load_table import Cells, best_arm, cells_of, is_fixed_arm, loads, throughput_ratio

_FIXED_ARMS = [name for name in ARMS if is_fixed_arm(name) and name != NO_SPECULATION]
_STYLES: dict[str, dict[str, Any]] = {
    NO_SPECULATION: {"color": "black", "linewidth": 1.5},
    **{
        name: {"color": colormaps["viridis"](0.9 - 0.8 * i / (len(_FIXED_ARMS) - 1)), "linewidth": 0.9}
        for i, name in enumerate(_FIXED_ARMS)
    },
    ADAPTIVE: {"color": "tab:red", "linewidth": 2.5, "zorder": 3},
    "unfitted": {"color": "tab:orange", "linewidth": 1.5, "linestyle": "--"},
    "threshold": {"color": "tab:blue", "linewidth": 1.5, "linestyle": "--"},
}


def draw_throughput_ratio(measurements: Iterable[Measurement], file: Path, provenance: str) -> None:
    """Each arm's tokens/s over the best fixed arm's at the same load, against the number of requests."""

    def draw(axes: Any, cells: Cells, sampling: str) -> None:
        concurrencies = [concurrency for name, concurrency in loads(cells) if name == sampling]
        for arm in _arms(cells, sampling):
            points = []
            for concurrency in concurrencies:
                baseline = best_arm(cells, sampling, concurrency, is_fixed_arm)
                ratio = baseline and throughput_ratio(cells, sampling, concurrency, arm, baseline)
                if ratio:
                    points.append((concurrency, ratio))
            if points:
                medians = [ratio.median for _, ratio in points]
                bars = [
                    [ratio.median - ratio.lower_quartile for _, ratio in points],
                    [ratio.upper_quartile - ratio.median for _, ratio in points],
                ]
                axes.errorbar(
                    [concurrency for concurrency, _ in points],
                    medians,
                    yerr=bars if arm == ADAPTIVE else None,
                    capsize=3,
                    marker="o",
                    markersize=3,
                    label=arm,
                    **_STYLES[arm],
                )
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(
            title=sampling,
            xlabel="requests at a time",
            ylabel="tokens/s over the best fixed number of drafts",
            xscale="log",
        )
        axes.set_xticks(concurrencies, [str(concurrency) for concurrency in concurrencies])
        axes.minorticks_off()

    _draw(measurements, file, provenance, draw)


def draw_pareto(measurements: Iterable[Measurement], file: Path, provenance: str) -> None:
    """Tokens/s of all requests together against those of one; a line per arm, a point per number of requests."""

    def draw(axes: Any, cells: Cells, sampling: str) -> None:
        for arm in _arms(cells, sampling):
            loaded = [cells[cell] for cell in cells if (cell.sampling, cell.arm) == (sampling, arm)]
            axes.plot(
                [1e3 / statistics.median(m.time_per_output_token_ms for m in cell) for cell in loaded],
                [statistics.median(m.tokens_per_second for m in cell) for cell in loaded],
                marker="o",
                markersize=3,
                label=arm,
                **_STYLES[arm],
            )
        axes.set(title=sampling, xlabel="tokens/s of one request", ylabel="tokens/s of all requests")

    _draw(measurements, file, provenance, draw)


def _draw(
    measurements: Iterable[Measurement], file: Path, provenance: str, draw: Callable[[Any, Cells, str], None]
) -> None:
    """A PNG with one picture for each sampling, of the arms in steady state; nothing where there are none."""
    cells = cells_of(measurement for measurement in measurements if not ARMS[measurement.arm].cold)
    samplings = list(dict.fromkeys(cell.sampling for cell in cells))
    if not samplings:
        return
    figure = Figure(figsize=(6.5 * len(samplings), 5.5), layout="constrained")
    for axes, sampling in zip(figure.subplots(1, len(samplings), squeeze=False)[0], samplings, strict=True):
        draw(axes, cells, sampling)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.supxlabel("\n".join(textwrap.wrap(provenance, 110 * len(samplings))), fontsize=6, color="grey")
    figure.savefig(file, format="png", dpi=120)


def _arms(cells: Cells, sampling: str) -> list[str]:
    measured = {cell.arm for cell in cells if cell.sampling == sampling}
    return [name for name in ARMS if name in measured]

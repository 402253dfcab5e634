"""Adaptive verification against fixed numbers of drafts and other rules, from 1 to 64 requests at a time.

    python perf/load.py                 # everything; goes on where it was interrupted
    python perf/load.py --quick         # a few points, within ten minutes

perf_analyzer keeps so many streams busy at one running server, and the server's own counters say how many tokens came
out of it, and in how many seconds, in a window after the streams have filled up. The arms take turns, a window each, so
that a slow spell of the machine falls on all of them, and the table has ratios of windows of the same round: medians
over `--repeats` times `--windows` rounds. Every arm's window in a round is the same work, so many output tokens of the
same requests from the same place on: as many as no speculation gives in `--window-seconds`. Between arms only the
estimator is loaded anew, and prefix caching is off.

Writes into the folder `--output`: load.csv (a line per window, at once), load.md, throughput_ratio.png, pareto.png. A
window that takes longer than `--point-seconds` is left out. The bar shows the time that is left; at some 18 seconds a
window, all in,

    --arms k0 k1 av --concurrency 1 8 32    takes a good hour,
    everything                              about ten.

Arms: k0 no speculation; k1 to k7 so many drafts, all verified; av adaptive verification, after it has learned;
unfitted with the drafter's own q_max for the acceptance probability (EAGLE-2's rule); threshold drafts are verified
until q_max falls below the setting `threshold`. k0-cold and av-cold are no speculation and adaptive verification with
nothing learned, each over the first 2,000 output tokens from an idle server on, and are compared with each other, once
in a repeat: `--arms k0-cold av-cold --repeats 12 --windows 1` says more of them.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import random
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts

from adaptive_verification.errors import SetupError
from adaptive_verification.serving.launcher import RunningServer, ServerOptions, running_server
from perf import perf_analyzer
from perf.estimator_switch import EstimatorSwitch
from perf.load_plan import (
    ARMS,
    COLD_TOKENS,
    MAX_DRAFT_TOKENS,
    NO_SPECULATION,
    SAMPLINGS,
    Point,
    expected_seconds,
    plan,
)
from perf.load_plot import draw_pareto, draw_throughput_ratio
from perf.load_requests import ramp_up_tokens, requests_of_round
from perf.load_results import Measurement, ResultsDirectory
from perf.load_table import markdown
from perf.load_window import OUTPUT_TOKENS, Counted, Window
from perf.provenance import provenance
from perf.server_counters import publications, read_counters, read_idle_counters
from perf.study_file import resumable

LEARNING_CONCURRENCY = 8
"""Requests at a time while an estimator learns, at most."""
NUM_PROMPTS = 256
QUICK = {
    "samplings": ["greedy"],
    "concurrency": [1, 8, 32],
    "arms": ["k0", "k2", "k7", "av"],
    "repeats": 1,
    "windows": 2,
    "window_seconds": 5.0,
    "max_tokens": 32,
    "learning_tokens": 1000,
    "max_prompt_characters": 300,
    "output": Path("perf/results/load_quick"),
}
"""Other defaults with --quick."""


class LoadStudy:
    """Measures points on one running server.

    Args:
        server: running, with no other clients.
        options: the command line's.
        texts: prompts.
        directory: for the estimators' states and other temporary files.
        costs: where the server's stages have published their cost curves.
    """

    def __init__(
        self, server: RunningServer, options: argparse.Namespace, texts: list[str], directory: Path, costs: Path
    ) -> None:
        self._server = server
        self._options = options
        self._texts = texts
        self._input_data = directory / "inputs.json"
        self._switch = EstimatorSwitch(server, costs, directory / "estimators")
        self._learned: set[str] = set()
        self._pace: dict[tuple[str, int], float] = {}
        self._window_tokens: dict[tuple[str, int, int, int], int] = {}

    def measure(self, point: Point) -> Measurement:
        """One point, after what it needs beforehand.

        Raises:
            TimeoutError: it takes too long.
            RuntimeError: perf_analyzer failed.
        """
        arm = ARMS[point.arm]
        window = Window(0, COLD_TOKENS) if arm.cold else self._window(point)
        self._prepare(point)
        counted = self._count(point, window)
        if point.arm == NO_SPECULATION:
            self._pace[point[:2]] = counted.tokens_per_second
        counts = {name: round(count) for name, count in counted.counts.items()}
        return Measurement(
            *point,
            seconds=counted.seconds,
            tokens=counts[OUTPUT_TOKENS],
            steps=counts["av_steps_total"],
            prompt_tokens=counts["av_prompt_tokens_total"],
            first_tokens=counts["av_first_tokens_total"],
            first_tokens_ms=counted.counts["av_time_to_first_token_milliseconds_total"],
            drafted_tokens=counts['av_draft_tokens_total{state="drafted"}'],
            admitted_tokens=counts['av_draft_tokens_total{state="admitted"}'],
            accepted_tokens=counts['av_draft_tokens_total{state="accepted"}'],
            measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    def _window(self, point: Point) -> Window:
        """The same one for all arms of a round: as long as it should be at the last known pace of no speculation."""
        load, round_number = point[:2], (*point[:2], point.repeat, point.window)
        skipped = ramp_up_tokens(point.concurrency, self._options.max_tokens)
        if load not in self._pace:
            plain = point._replace(arm=NO_SPECULATION)
            self._prepare(plain)
            self._pace[load] = self._count(plain, Window(skipped, skipped)).tokens_per_second
        tokens = self._window_tokens.setdefault(round_number, round(self._pace[load] * self._options.window_seconds))
        return Window(skipped, tokens)

    def _prepare(self, point: Point) -> None:
        """Loads the arm's estimator, and lets it learn what it must know."""
        arm = ARMS[point.arm]
        # Arms that differ in the requests alone share an estimator; what acceptance is like depends on the sampling.
        estimator = "fixed" if arm.is_fixed else f"{arm.name}-{point.sampling}"
        read_idle_counters(self._server)
        self._switch.choose(estimator, arm.estimator_settings, fresh=arm.cold)
        if arm.learns and estimator not in self._learned:
            learning = point._replace(concurrency=LEARNING_CONCURRENCY)
            self._count(learning, Window(0, self._options.learning_tokens))
            self._learned.add(estimator)

    def _count(self, point: Point, window: Window) -> Counted:
        """Keeps the point's streams busy until the window has ended."""
        self._write_requests(point)
        before = read_idle_counters(self._server)
        deadline = time.monotonic() + self._options.point_seconds
        with perf_analyzer.keep_running(
            self._server.grpc_url, self._input_data, concurrency=point.concurrency
        ) as check_running:

            def read() -> dict[str, float]:
                check_running()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes longer than {self._options.point_seconds:.0f} s")
                return read_counters(self._server)

            return window.measure(before, publications(read, before))

    def _write_requests(self, point: Point) -> None:
        """The same requests for all arms of a round."""
        options = self._options
        rng = random.Random(f"{options.seed}, {point.repeat}, {point.window}")
        requests = requests_of_round(self._texts, options.max_tokens, point.concurrency, rng)
        perf_analyzer.write_input_data(
            self._input_data,
            [request.text for request in requests],
            max_tokens=[request.max_tokens for request in requests],
            chat=not options.plain_text,
            num_draft_tokens=ARMS[point.arm].num_draft_tokens,
            seed=rng.getrandbits(32),
            stream=True,
            **SAMPLINGS[point.sampling],
        )


def run_study(
    options: argparse.Namespace, results: ResultsDirectory[Measurement], points: list[Point], texts: list[str]
) -> None:
    """Measures all points that are not measured yet.

    Raises:
        SetupError: the server did not start, or some points had to be left out.
    """
    measured = {measurement.point for measurement in results.measurements}
    missing = [point for point in points if point not in measured]
    if not missing:
        return
    results.study_file.begin_run(provenance())
    expected = {
        point: expected_seconds(point, window_s=options.window_seconds, max_tokens=options.max_tokens)
        for point in points
    }
    left_out = 0
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory, "state")
        settings = server_settings(options)
        print("Starting the server ...", file=sys.stderr)
        with (
            running_server(ServerOptions(settings=settings, state_directory=state)) as server,
            tqdm(
                total=round(sum(expected[point] for point in missing)),
                bar_format="{desc} {percentage:.0f}%|{bar}| {elapsed} passed, {remaining} left",
                smoothing=0,
            ) as progress,
        ):
            study = LoadStudy(server, options, texts, Path(directory), state)
            for point in missing:
                description = f"{point.concurrency} requests, {point.sampling}, {point.arm}"
                progress.set_description(description)
                try:
                    results.add(study.measure(point))
                except (TimeoutError, RuntimeError) as error:
                    progress.write(f"Left out: {description}: {error}")
                    left_out += 1
                progress.update(expected[point])
    if left_out:
        raise SetupError(f"{left_out} points were left out. The same command tries them again.")


def write_report(results: ResultsDirectory[Measurement]) -> None:
    """The table and the pictures of all measurements there are."""
    if not results.measurements:
        return
    table = markdown(results.measurements) + "\n\n" + "\n\n".join(results.study_file.provenance) + "\n"
    (results.path / "load.md").write_text(table)
    about = " / ".join(results.study_file.provenance).replace("`", "")
    draw_throughput_ratio(results.measurements, results.path / "throughput_ratio.png", about)
    draw_pareto(results.measurements, results.path / "pareto.png", about)
    print(table)


def server_settings(options: argparse.Namespace) -> dict[str, str]:
    """Setting -> value, of every model that has it.

    The arms serve the same prompts one after the other, so none may find computed what the one before has left.
    """
    own = {"num_draft_tokens": str(MAX_DRAFT_TOKENS), "prefix_caching": "false"}
    return {**dict(item.split("=", 1) for item in options.set), **own}


def prompt_files(paths: list[Path] | None) -> list[Path] | None:
    """The files themselves and all JSON lines files of folders; None, for the shared ones, where none are named."""
    if paths is None:
        return None
    return [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]


def positive(text: str) -> int:
    """A number on the command line."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="other defaults: a few points, within ten minutes")
    parser.add_argument("--output", type=Path, default=Path("perf/results/load"), help="folder (perf/results/load)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="default: all")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), metavar="SAMPLING",
                        help="greedy: temperature 0; sampled: temperature 1, top-p 0.95 (both)")  # fmt: skip
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64],
                        help="requests at a time (1 2 4 8 16 32 64)")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=3, help="times that all loads are gone through (3)")
    parser.add_argument("--windows", type=positive, default=4, help="of each arm, one load and repeat (4)")
    parser.add_argument("--window-seconds", type=float, default=12.0,
                        help="length of a window without speculation, about (12)")  # fmt: skip
    parser.add_argument("--max-tokens", type=positive, default=64, help="output tokens of a request, in the mean (64)")
    parser.add_argument("--learning-tokens", type=positive, default=4000,
                        help="output tokens until an estimator counts as having learned (4000)")  # fmt: skip
    parser.add_argument("--point-seconds", type=float, default=600.0, help="longest time for a window (600)")
    parser.add_argument("--prompts", type=Path, nargs="+", metavar="PATH",
                        help="JSON lines files with a `prompt` each, or folders of them")  # fmt: skip
    parser.add_argument("--max-prompt-characters", type=positive, default=600, help="longer prompts are left out (600)")
    parser.add_argument(
        "--plain-text", action="store_true", help="prompts as they are, for targets without a chat template"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts and of what is sampled (0)")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE",
                        help="of every model that has it")  # fmt: skip
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    texts = prompts(NUM_PROMPTS, options.max_prompt_characters, files=prompt_files(options.prompts), seed=options.seed)
    study = {
        **{name: getattr(options, name) for name in
           ("max_tokens", "window_seconds", "learning_tokens", "plain_text", "seed")},
        "prompts": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "settings": server_settings(options),
    }  # fmt: skip
    points = plan(options.samplings, options.concurrency, options.arms, options.repeats, options.windows)
    with resumable():
        results = ResultsDirectory(options.output, study, Measurement, "load.csv")
        try:
            run_study(options, results, points, texts)
        finally:
            write_report(results)


if __name__ == "__main__":
    main()

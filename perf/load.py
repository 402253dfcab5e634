"""Adaptive verification against fixed numbers of drafts and other rules, from 1 to 64 requests at a time.

    python perf/load.py                 # everything; goes on where it was interrupted
    python perf/load.py --quick         # a few points, within ten minutes

perf_analyzer streams the same requests to one running server for every arm; between arms only the estimator is loaded
anew. Writes into the folder `--output`: load.csv (a line per point, at once), load.md, throughput_ratio.png,
pareto.png. A point that takes longer than `--point-seconds` is left out.

Arms: k0 no speculation; k1 to k7 so many drafts, all verified; av adaptive verification, after it has learned;
av-cold the same from nothing learned; unfitted with the drafter's own q_max for the acceptance probability (EAGLE-2's
rule); threshold drafts are verified until q_max falls below the setting `threshold`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts

from adaptive_verification.errors import SetupError
from adaptive_verification.serving.launcher import RunningServer, ServerOptions, running_server
from perf import perf_analyzer
from perf.estimator_switch import EstimatorSwitch
from perf.load_plan import ARMS, MAX_DRAFT_TOKENS, SAMPLINGS, Point, plan
from perf.load_plot import draw_pareto, draw_throughput_ratio
from perf.load_results import Measurement, ResultsDirectory
from perf.load_table import markdown
from perf.provenance import provenance
from perf.server_counters import read_idle_counters
from perf.study_file import resumable

WARM_UP_TOKENS = 16
"""Output tokens of each request of the run before a point, one request per stream."""
LEARNING_CONCURRENCY = 8
"""Requests at a time while an estimator learns, at most."""
NUM_PROMPTS = 256
QUICK = {
    "samplings": ["greedy"],
    "concurrency": [1, 8, 32],
    "arms": ["k0", "k2", "k7", "av"],
    "repeats": 1,
    "max_tokens": 16,
    "requests_per_stream": 1,
    "min_requests": 2,
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

    def measure(self, point: Point) -> Measurement:
        """One point, after what it needs beforehand.

        Raises:
            subprocess.TimeoutExpired: it takes too long.
            RuntimeError: perf_analyzer failed repeatedly.
        """
        options, arm = self._options, ARMS[point.arm]
        read_idle_counters(self._server)  # nothing is left of a point that was cut short
        # Arms that differ in the requests alone share an estimator; what acceptance is like depends on the sampling.
        estimator = "fixed" if arm.is_fixed else f"{arm.name}-{point.sampling}"
        self._switch.choose(estimator, arm.estimator_settings)
        if arm.learns and estimator not in self._learned:
            learning = point._replace(concurrency=min(LEARNING_CONCURRENCY, options.learning_requests))
            self._run(learning, requests=options.learning_requests, max_tokens=options.max_tokens)
            self._learned.add(estimator)
        self._run(point, requests=point.concurrency, max_tokens=WARM_UP_TOKENS)
        before: dict[str, float] = {}

        def prepare() -> None:
            counters = read_idle_counters(self._server)
            if arm.cold:
                self._switch.choose(estimator, arm.estimator_settings, fresh=True)
            before.update(counters)

        requests = max(options.min_requests, options.requests_per_stream * point.concurrency)
        report = self._run(point, requests=requests, max_tokens=options.max_tokens, prepare=prepare)
        after = read_idle_counters(self._server)

        def counted(name: str) -> int:
            return round(after[name] - before[name])

        return Measurement(
            *point,
            requests=report.requests,
            output_tokens=report.output_tokens,
            duration_s=report.duration_s,
            tokens_per_second=report.output_tokens / report.duration_s,
            time_to_first_token_ms=report.time_to_first_response_s * 1e3,
            time_per_output_token_ms=report.time_per_output_token_s * 1e3,
            steps=counted("av_steps_total"),
            decoded_tokens=counted("av_output_tokens_total"),
            drafted_tokens=counted('av_draft_tokens_total{state="drafted"}'),
            admitted_tokens=counted('av_draft_tokens_total{state="admitted"}'),
            accepted_tokens=counted('av_draft_tokens_total{state="accepted"}'),
            measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    def _run(
        self, point: Point, *, requests: int, max_tokens: int, prepare: Callable[[], None] = lambda: None
    ) -> perf_analyzer.StreamReport:
        perf_analyzer.write_input_data(
            self._input_data,
            self._texts[:requests],
            chat=not self._options.plain_text,
            max_tokens=max_tokens,
            num_draft_tokens=ARMS[point.arm].num_draft_tokens,
            seed=self._options.seed + point.repeat,
            stream=True,
            **SAMPLINGS[point.sampling],
        )
        return perf_analyzer.run(
            self._server.grpc_url,
            self._input_data,
            concurrency=point.concurrency,
            request_count=requests,
            timeout_s=self._options.point_seconds,
            prepare=prepare,
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
    left_out = 0
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory, "state")
        settings = server_settings(options)
        print("Starting the server ...", file=sys.stderr)
        with (
            running_server(ServerOptions(settings=settings, state_directory=state)) as server,
            tqdm(total=len(points), initial=len(points) - len(missing), unit="point", smoothing=0) as progress,
        ):
            study = LoadStudy(server, options, texts, Path(directory), state)
            for point in missing:
                description = f"{point.arm}, {point.sampling}, {point.concurrency} requests"
                progress.set_description(description)
                try:
                    results.add(study.measure(point))
                except (subprocess.TimeoutExpired, RuntimeError) as error:
                    progress.write(f"Left out: {description}: {error}")
                    left_out += 1
                progress.update()
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
    """Setting -> value, of every model that has it."""
    return {**dict(item.split("=", 1) for item in options.set), "num_draft_tokens": str(MAX_DRAFT_TOKENS)}


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
    parser.add_argument("--repeats", type=positive, default=3, help="times that every point is measured (3)")
    parser.add_argument("--max-tokens", type=positive, default=64, help="output tokens of a request, at most (64)")
    parser.add_argument(
        "--requests-per-stream", type=positive, default=2, help="requests of a point over concurrency (2)"
    )
    parser.add_argument("--min-requests", type=positive, default=8, help="requests of a point, at least (8)")
    parser.add_argument("--learning-requests", type=positive, default=64,
                        help="requests that an estimator serves before it is measured (64)")  # fmt: skip
    parser.add_argument("--point-seconds", type=float, default=600.0, help="longest run of perf_analyzer (600)")
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
           ("max_tokens", "requests_per_stream", "min_requests", "learning_requests", "plain_text", "seed")},
        "prompts": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "settings": server_settings(options),
    }  # fmt: skip
    points = plan(options.samplings, options.concurrency, options.arms, options.repeats)
    with resumable():
        results = ResultsDirectory(options.output, study, Measurement, "load.csv")
        try:
            run_study(options, results, points, texts)
        finally:
            write_report(results)


if __name__ == "__main__":
    main()

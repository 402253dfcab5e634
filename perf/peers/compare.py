"""Adaptive verification against other servers and libraries: the same prompts and sampling, on the same machine.

    perf/peers/setup.sh                     # once: vLLM in an environment of its own
    python perf/peers/compare.py            # goes on where it was interrupted

Every round starts one peer after the other and lets it serve every number of requests at a time, so that a slow spell
of the machine does not fall on one of them alone. Ours is the whole server, driven by perf_analyzer over gRPC; the
peers are called in their own processes, which spares them a server's work, on all cores and in the number format that
is fastest here. Answers come whole: the peers stream none, so ours does not either. Who reuses what earlier requests
had computed does so, as by default (ours, and vLLM); but no prompt is sent twice to one process. Writes into the folder
`--output`: peers.csv (a line per point, at once), peers.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))
from perf import perf_analyzer
from perf.load import positive, prompt_files
from perf.load_plan import MAX_DRAFT_TOKENS, SAMPLINGS
from perf.load_results import ResultsDirectory
from perf.provenance import provenance
from perf.study_file import resumable
from tests.prompts import prompts

from adaptive_verification.errors import SetupError
from adaptive_verification.forward.placement import choose_device, choose_dtype
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.serving.environment import available_cpus
from adaptive_verification.serving.launcher import ServerOptions, running_server

OURS = "adaptive verification"
OURS_PLAIN = "ours, no speculation"
WARM_UP_TOKENS = 16
WARM_UP_REQUESTS = 2

Run = Callable[[dict[str, Any]], "Outcome"]
"""Serves one batch, see `protocol`."""


class Outcome(NamedTuple):
    output_tokens: int
    duration_s: float


@dataclass(frozen=True)
class Peer:
    """Someone else's way to do the same."""

    python: Path
    script: str
    mode: str
    most_concurrent: int | None = None
    """Requests at a time that it can serve together; None: any number."""


FOLDER = Path(__file__).parent
VLLM_PYTHON = FOLDER.parents[1] / ".peers/vllm/bin/python"
PEERS = {
    "transformers": Peer(Path(sys.executable), "run_transformers.py", "static"),
    "transformers, prompt lookup": Peer(Path(sys.executable), "run_transformers.py", "lookup", most_concurrent=1),
    "transformers, continuous": Peer(Path(sys.executable), "run_transformers.py", "continuous"),
    "vLLM": Peer(VLLM_PYTHON, "run_vllm.py", "plain"),
    "vLLM, n-gram": Peer(VLLM_PYTHON, "run_vllm.py", "ngram"),
}


@dataclass(frozen=True)
class Measurement:
    """One point."""

    peer: str
    sampling: str
    concurrency: int
    repeat: int
    requests: int
    output_tokens: int
    duration_s: float
    error: str

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.peer, self.sampling, self.concurrency, self.repeat

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


@contextlib.contextmanager
def peer_process(peer: Peer, model: str) -> Iterator[Run]:
    """A peer that is ready for batches.

    Raises:
        SetupError: its environment is missing, or it ended.
    """
    if not peer.python.exists():
        raise SetupError(f"{peer.python} is missing; perf/peers/setup.sh makes it")
    dtype = str(choose_dtype("auto", choose_device("auto"))).removeprefix("torch.")
    command = [str(peer.python), str(FOLDER / peer.script), model, peer.mode, dtype]
    variables = {**os.environ, "OMP_NUM_THREADS": str(available_cpus())}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=variables
        ) as process,  # fmt: skip
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines, answers = process.stdin, process.stdout

        def run(batch: dict[str, Any]) -> Outcome:
            try:
                lines.write(json.dumps(batch) + "\n")
                lines.flush()
                answer = json.loads(answers.readline() or "{}")
            except OSError:
                answer = {}
            if "duration_s" not in answer:
                log.seek(0)
                raise SetupError(answer.get("error") or f"it ended: {log.read()[-1500:].strip()}")
            return Outcome(**answer)

        try:
            yield run
        finally:
            with contextlib.suppress(OSError):
                lines.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def our_server(state_directory: Path, num_draft_tokens: int) -> Iterator[Run]:
    """Ours, which keeps what it learned from round to round."""
    settings = {"num_draft_tokens": str(MAX_DRAFT_TOKENS)}
    with running_server(ServerOptions(settings=settings, state_directory=state_directory)) as server:

        def run(batch: dict[str, Any]) -> Outcome:
            with tempfile.TemporaryDirectory() as directory:
                inputs = Path(directory, "inputs.json")
                names = ("temperature", "top_p", "max_tokens", "seed")
                perf_analyzer.write_input_data(
                    inputs, batch["prompts"], chat=True, stream=False, num_draft_tokens=num_draft_tokens,
                    **{name: batch[name] for name in names},
                )  # fmt: skip
                report = perf_analyzer.run(
                    server.grpc_url, inputs, concurrency=batch["concurrency"], request_count=len(batch["prompts"]),
                    timeout_s=1800,
                )  # fmt: skip
            return Outcome(report.output_tokens, report.duration_s)

        yield run


def num_requests(options: argparse.Namespace, concurrency: int) -> int:
    """Of a point."""
    return max(options.min_requests, options.requests_per_stream * concurrency)


def prompts_of_points(options: argparse.Namespace) -> dict[tuple[str, int], list[str]]:
    """Different prompts for each sampling and concurrency, the same for all peers and rounds; "" for warming up."""
    counts = {("", 0): WARM_UP_REQUESTS} | {
        (sampling, concurrency): num_requests(options, concurrency)
        for sampling in options.samplings
        for concurrency in options.concurrency
    }
    texts = prompts(
        sum(counts.values()), options.max_prompt_characters, files=prompt_files(options.prompts), seed=options.seed
    )
    rest = iter(texts)
    return {point: list(itertools.islice(rest, count)) for point, count in counts.items()}


def measure(
    options: argparse.Namespace,
    results: ResultsDirectory[Measurement],
    texts: Mapping[tuple[str, int], Sequence[str]],
) -> None:
    """Measures all points that are not measured yet. A peer that fails is noted, and the others go on."""
    model = resolve_model(options.target)
    done = {measurement.key for measurement in results.measurements}
    points = [
        (peer, sampling, concurrency, repeat)
        for repeat in range(options.repeats)
        for peer in options.peers
        for sampling in options.samplings
        for concurrency in options.concurrency
        if concurrency <= (_most_concurrent(peer) or concurrency)
    ]
    missing = [point for point in points if point not in done]
    if not missing:
        return
    results.study_file.begin_run(provenance())
    with tqdm(total=len(points), initial=len(points) - len(missing), unit="point", smoothing=0) as progress:
        for repeat in range(options.repeats):
            for name in options.peers:
                own = [point for point in missing if point[0] == name and point[3] == repeat]
                if not own:
                    continue
                progress.set_description(f"{name}, round {repeat + 1}")
                with contextlib.ExitStack() as stack:
                    try:
                        run = stack.enter_context(_opened(name, model, results.path / "state"))
                        run(_batch(texts["", 0], "greedy", WARM_UP_REQUESTS, WARM_UP_TOKENS, repeat))
                    except SetupError as error:
                        for point in own:
                            results.add(Measurement(*point, 0, 0, 0.0, _one_line(error)))
                            progress.update()
                        continue
                    for point in own:
                        results.add(_measured(run, point, texts[point[1], point[2]], options.max_tokens))
                        progress.update()


def _measured(run: Run, point: tuple[str, str, int, int], texts: Sequence[str], max_tokens: int) -> Measurement:
    _, sampling, concurrency, repeat = point
    try:
        outcome = run(_batch(texts, sampling, concurrency, max_tokens, repeat))
    except (SetupError, RuntimeError) as error:
        return Measurement(*point, len(texts), 0, 0.0, _one_line(error))
    return Measurement(*point, len(texts), outcome.output_tokens, outcome.duration_s, "")


def _batch(texts: Sequence[str], sampling: str, concurrency: int, max_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "prompts": list(texts),
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        "seed": seed,
        "top_p": 1.0,
        **SAMPLINGS[sampling],
    }


def _opened(name: str, model: str, state: Path) -> contextlib.AbstractContextManager[Run]:
    if name in (OURS, OURS_PLAIN):
        return our_server(state, MAX_DRAFT_TOKENS if name == OURS else 0)
    return peer_process(PEERS[name], model)


def _most_concurrent(name: str) -> int | None:
    return PEERS[name].most_concurrent if name in PEERS else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[-300:]


def markdown(measurements: Sequence[Measurement]) -> str:
    """Median tokens per second, and ours over the fastest peer's."""
    names = list(dict.fromkeys(measurement.peer for measurement in measurements))
    columns = sorted({(measurement.sampling, measurement.concurrency) for measurement in measurements})

    def value(name: str, column: tuple[str, int]) -> float | None:
        speeds = [
            measurement.tokens_per_second
            for measurement in measurements
            if (measurement.peer, measurement.sampling, measurement.concurrency) == (name, *column)
            and not measurement.error
        ]
        return median(speeds) if speeds else None

    lines = [
        "| tokens/s | " + " | ".join(f"{sampling}, {concurrency}" for sampling, concurrency in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name in names:
        values = [value(name, column) for column in columns]
        lines.append(f"| {name} | " + " | ".join("-" if v is None else f"{v:.1f}" for v in values) + " |")
    ratios = []
    for column in columns:
        ours = value(OURS, column)
        peers = [speed for name in names if name in PEERS and (speed := value(name, column)) is not None]
        ratios.append(f"{ours / max(peers):.2f}" if ours is not None and peers else "-")
    lines.append("| **ours / fastest peer** | " + " | ".join(ratios) + " |")
    failures = sorted({(m.peer, m.error) for m in measurements if m.error})
    lines += ["", *(f"{peer} failed: `{error}`" for peer, error in failures)]
    return "\n".join(lines).rstrip()


def parse_arguments() -> argparse.Namespace:
    names = [OURS, OURS_PLAIN, *PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("perf/results/peers"), help="folder (perf/results/peers)")
    parser.add_argument("--target", default="default", help="model (the default pair's target)")
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), metavar="SAMPLING",
                        help="greedy: temperature 0; sampled: temperature 1, top-p 0.95 (both)")  # fmt: skip
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8, 32, 64],
                        help="requests at a time (1 8 32 64)")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=3, help="rounds (3)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="output tokens of a request, at most (128)")
    parser.add_argument("--requests-per-stream", type=positive, default=1, help="requests over concurrency (1)")
    parser.add_argument("--min-requests", type=positive, default=4, help="requests of a point, at least (4)")
    parser.add_argument("--prompts", type=Path, nargs="+", metavar="PATH",
                        help="JSON lines files with a `prompt` each, or folders of them")  # fmt: skip
    parser.add_argument("--max-prompt-characters", type=positive, default=600, help="longer prompts are left out (600)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (0)")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    texts = prompts_of_points(options)
    names = ("target", "samplings", "concurrency", "max_tokens", "requests_per_stream", "min_requests")
    study = {
        **{name: getattr(options, name) for name in names},
        "prompts": hashlib.sha256("\0".join(itertools.chain(*texts.values())).encode()).hexdigest(),
    }
    with resumable():
        results = ResultsDirectory(options.output, study, Measurement, "peers.csv")
        try:
            measure(options, results, texts)
        finally:
            if results.measurements:
                table = markdown(results.measurements)
                (options.output / "peers.md").write_text("\n\n".join([table, *results.study_file.provenance]) + "\n")
                print(table)


if __name__ == "__main__":
    main()

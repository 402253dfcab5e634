"""How well each feature predicts acceptance, on recorded traffic: AUC, log-loss and ECE, by position too.

    python perf/feature_table.py                              # the default pair; goes on where it was interrupted
    python perf/feature_table.py --set target=DIR --set drafter=DIR --output perf/results/features_mine
    python perf/feature_table.py --traces trace.json          # of your own traffic: `adaptive-verification record`

Starts a server that drafts and verifies 7 tokens for every request in every step, keeps 64 sampled requests in flight
(temperature 1, top-p 0.95) and records what became of each draft until there are `--labels` labelled ones. Looked-up
drafts are not the model's: none are made. Then every feature is fitted, offline and online.

Writes into the folder `--output`: features.csv, features.md, reliability.png, auc_by_position.png, and the recordings
themselves under recordings/. `--traces` need a drafter with draft_features=all.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts

from adaptive_verification.estimation.trace import Trace
from adaptive_verification.serving.launcher import ServerOptions, running_server
from perf.feature_labels import joined
from perf.feature_plot import draw_auc_by_position, draw_reliability
from perf.feature_recording import SteadyLoad, read_traces, record, recorded_labels
from perf.feature_report import Study, markdown, write_csv
from perf.load import positive, prompt_files
from perf.load_plan import MAX_DRAFT_TOKENS, SAMPLINGS
from perf.provenance import provenance
from perf.study_file import StudyFile, resumable

SETTINGS = {
    "num_draft_tokens": str(MAX_DRAFT_TOKENS),
    "max_draft_tokens": str(MAX_DRAFT_TOKENS),
    "trim": "off",
    "lookup_min_match": "0",
    "draft_features": "all",
}
"""Of the server; `--set` goes before."""
NUM_PROMPTS = 4096
"""Then they begin anew, with other seeds."""
RUN_STRIDE = 1_000_003
"""Requests between the first ones of two runs; more than a run has."""
EXIT_TIMEOUT_S = 5
"""The requests in flight at the end are not waited for any longer."""


def requests(texts: list[str], options: argparse.Namespace, run_number: int) -> Iterator[dict[str, Any]]:
    """Endless inputs of `generate`; runs begin at different prompts, and no two requests have the same seed."""
    for number in itertools.count(run_number * RUN_STRIDE):
        text = texts[number % len(texts)]
        prompt = {"messages": json.dumps([{"role": "user", "content": text}])}
        yield {
            **({"text_input": text} if options.plain_text else prompt),
            **SAMPLINGS["sampled"],
            "max_tokens": options.max_tokens,
            "seed": options.seed * 2**32 + number,
        }


def record_missing(options: argparse.Namespace, directory: Path, study: StudyFile, texts: list[str]) -> None:
    """Records what the folder lacks.

    Raises:
        SetupError: the server did not start, or a request failed.
    """
    if recorded_labels(directory) >= options.labels:
        return
    study.begin_run(provenance())
    print("Starting the server ...", file=sys.stderr)
    server_options = ServerOptions(
        settings=server_settings(options), state_directory=directory, exit_timeout_s=EXIT_TIMEOUT_S
    )
    inputs = requests(texts, options, run_number=len(list(directory.glob("recording-*.jsonl"))))
    with (
        running_server(server_options) as server,
        SteadyLoad(server.http_url, inputs, options.concurrency) as load,
    ):
        record(load, directory, options.labels)


def write_report(traces: list[Trace], directory: Path, about: list[str]) -> None:
    """The tables and pictures of all that was recorded, if anything was."""
    if not traces:
        return
    study = Study.of(joined(traces))
    write_csv(study, directory / "features.csv")
    table = markdown(study) + "\n\n" + "\n\n".join(about) + "\n"
    (directory / "features.md").write_text(table)
    line = " / ".join(about).replace("`", "")
    draw_reliability(study, directory / "reliability.png", line)
    draw_auc_by_position(study, directory / "auc_by_position.png", line)
    print(table)


def server_settings(options: argparse.Namespace) -> dict[str, str]:
    """Setting -> value, of every model that has it."""
    return {**SETTINGS, **dict(item.split("=", 1) for item in options.set)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("perf/results/features"), help="folder (perf/results/features)"
    )
    parser.add_argument("--labels", type=positive, default=100_000, help="labelled drafts to record (100000)")
    parser.add_argument("--concurrency", type=positive, default=64, help="requests at a time (64)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="output tokens of a request, at most (128)")
    parser.add_argument("--prompts", type=Path, nargs="+", metavar="PATH",
                        help="JSON lines files with a `prompt` each, or folders of them")  # fmt: skip
    parser.add_argument("--max-prompt-characters", type=positive, default=4000,
                        help="longer prompts are left out (4000)")  # fmt: skip
    parser.add_argument("--plain-text", action="store_true",
                        help="prompts as they are, for targets without a chat template")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts and of what is sampled (0)")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE",
                        help="of every model that has it, e.g. drafter=DIR; may be repeated")  # fmt: skip
    parser.add_argument("--traces", type=Path, nargs="+", metavar="FILE", help="use these, and start no server")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    with resumable():
        if options.traces:
            options.output.mkdir(parents=True, exist_ok=True)
            write_report([Trace.read(path) for path in options.traces], options.output, [provenance()])
            return
        texts = prompts(
            NUM_PROMPTS, options.max_prompt_characters, files=prompt_files(options.prompts), seed=options.seed
        )
        study = StudyFile(
            options.output,
            {
                **{name: getattr(options, name) for name in ("concurrency", "max_tokens", "plain_text", "seed")},
                "prompts": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
                "settings": server_settings(options),
            },
        )
        directory = options.output / "recordings"
        directory.mkdir(exist_ok=True)
        try:
            record_missing(options, directory, study, texts)
        finally:
            write_report(read_traces(directory), options.output, study.provenance)


if __name__ == "__main__":
    main()

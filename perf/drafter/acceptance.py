"""How often a drafter's drafts are accepted on the server, by position, and what a step of it costs.

    python perf/drafter/acceptance.py --prompts ../shared/data/gsm8k.jsonl ../shared/data/mt_bench.jsonl

Everything that is drafted is verified (`trim=off`) and nothing is looked up, so the counts are the drafter's own. The
prompts are sent as a user's turn of a chat.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))
from perf import perf_analyzer
from perf.provenance import publish
from perf.server_counters import read_idle_counters, spent
from tests.prompts import prompts

from adaptive_verification.serving.launcher import ServerOptions, running_server

SAMPLINGS = {"0": (0.0, 1.0), "0.7": (0.7, 1.0), "1": (1.0, 1.0), "1, top-p 0.95": (1.0, 0.95)}


def acceptance_by_position(counted: dict[str, float], num_positions: int) -> list[float]:
    """Of the drafts at each position whose predecessors were all accepted, the share that was accepted.

    Args:
        counted: by the server. A sequence's last block counts as drafted, though its outcome is never reported:
            with some 30 steps a sequence, the first position is low by a thirtieth.
    """
    accepted = [
        counted.get(f'av_estimator_accepted_tokens_total{{position="{position}"}}', 0.0)
        for position in range(1, num_positions + 1)
    ]
    decided = [counted['av_estimator_admitted_tokens_total{position="1"}'], *accepted[:-1]]
    return [a / d if d else float("nan") for a, d in zip(accepted, decided, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--requests", type=int, default=48, help="with each sampling")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--drafter", help="default: the server's")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    arguments = parser.parse_args()

    depth = arguments.num_draft_tokens
    settings = {"num_draft_tokens": str(depth), "trim": "off", "lookup_min_match": "0"}
    if arguments.drafter:
        settings["drafter"] = arguments.drafter
    columns = ["temperature", *map(str, range(1, depth + 1)), "tokens/step", "drafter ms", "verifier ms", "blocks"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    texts = prompts(arguments.requests, max_characters=1500, files=arguments.prompts, seed=1)
    with tempfile.TemporaryDirectory() as directory:
        options = ServerOptions(settings=settings, state_directory=Path(directory, "state"))
        with running_server(options) as server:
            for name, (temperature, top_p) in tqdm(SAMPLINGS.items(), unit="sampling"):
                input_data = Path(directory, "inputs.json")
                perf_analyzer.write_input_data(
                    input_data,
                    texts,
                    chat=True,
                    max_tokens=arguments.max_tokens,
                    stream=True,
                    temperature=temperature,
                    top_p=top_p,
                )
                before = read_idle_counters(server)
                perf_analyzer.run(
                    server.grpc_url,
                    input_data,
                    concurrency=arguments.concurrency,
                    request_count=arguments.requests,
                    timeout_s=3600,
                )
                counted = spent(before, read_idle_counters(server))
                steps = counted["av_steps_total"]
                blocks = counted['av_estimator_admitted_tokens_total{position="1"}']
                accepted = sum(
                    value for key, value in counted.items() if key.startswith("av_estimator_accepted_tokens")
                )
                values = [*acceptance_by_position(counted, depth), 1 + accepted / blocks]
                milliseconds = [
                    counted[f'av_step_milliseconds_total{{part="{part}"}}'] / steps for part in ("drafter", "verifier")
                ]
                cells = [f"{value:.3f}" for value in values] + [f"{value:.1f}" for value in milliseconds]
                lines.append(f"| {name} | " + " | ".join(cells) + f" | {blocks:.0f} |")
    note = f"{arguments.concurrency} requests at a time, {depth} drafts, {arguments.max_tokens} tokens each"
    publish([*lines, "", note], arguments.output)


if __name__ == "__main__":
    main()

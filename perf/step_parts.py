"""Where a decode step's time goes: drafter, estimator, verifier, and everything else, against the number of requests.

    python perf/step_parts.py --concurrency 1 8 32 64

Starts a server, keeps so many streams busy with perf_analyzer, and reads the parts from the server's own metrics
(`av_step_milliseconds_total`). "Everything else" is what the stages did not see of a step: Triton between the stages,
packing, and the text front's loop.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts

from adaptive_verification.serving.launcher import ServerOptions, running_server
from perf import perf_analyzer
from perf.provenance import publish
from perf.server_counters import read_counters, spent

PARTS = ("drafter", "estimator", "verifier", "transport", "loop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SETTING=VALUE", help="of every model that has it"
    )
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    arguments = parser.parse_args()

    # the arms serve the same prompts, and none may find computed what the one before has left
    settings = {"prefix_caching": "false", **dict(item.split("=", 1) for item in arguments.set)}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory, "state")
        with running_server(ServerOptions(settings=settings, state_directory=state)) as server:
            arms = [(k, n) for n in arguments.concurrency for k in arguments.num_draft_tokens]
            for num_draft_tokens, concurrency in tqdm(arms, unit="arm"):
                input_data = Path(directory, "inputs.json")
                perf_analyzer.write_input_data(
                    input_data,
                    prompts(max(concurrency, 16), max_characters=200),
                    max_tokens=arguments.max_tokens,
                    stream=True,
                    temperature=arguments.temperature,
                    num_draft_tokens=num_draft_tokens,
                )
                before = read_counters(server)
                perf_analyzer.run(
                    server.grpc_url,
                    input_data,
                    concurrency=concurrency,
                    request_count=2 * concurrency,
                    timeout_s=1800,
                )
                counted = spent(before, read_counters(server))
                steps = counted["av_steps_total"]
                parts = {part: counted[f'av_step_milliseconds_total{{part="{part}"}}'] / steps for part in PARTS}
                rows.append(
                    (
                        concurrency,
                        num_draft_tokens,
                        sum(parts.values()),
                        *(parts[part] for part in PARTS[:3]),
                        parts["transport"] + parts["loop"],
                        counted["av_step_rows_total"] / steps,
                        counted["av_output_tokens_total"] / (sum(parts.values()) * steps / 1e3),
                    )
                )
    header = (
        "requests", "drafts", "step ms", "drafter", "estimator", "verifier", "everything else", "rows/step", "tokens/s",
    )  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += [f"| {row[0]} | {row[1]} | " + " | ".join(f"{value:.1f}" for value in row[2:]) + " |" for row in rows]
    publish(lines, arguments.output)


if __name__ == "__main__":
    main()

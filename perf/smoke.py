"""A short load test: does perf_analyzer run against `generate` with streaming, and what does it report?

make perf-smoke
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts

from adaptive_verification.serving.launcher import ServerOptions, running_server
from perf import perf_analyzer
from perf.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        input_data = Path(directory, "inputs.json")
        perf_analyzer.write_input_data(
            input_data, prompts(arguments.requests), max_tokens=arguments.max_tokens, stream=True, temperature=0.0
        )
        print("Starting the server ...", file=sys.stderr)
        with running_server(ServerOptions(state_directory=Path(directory, "state"))) as server:
            print("Running perf_analyzer ...", file=sys.stderr)
            report = perf_analyzer.run(
                server.grpc_url,
                input_data,
                concurrency=arguments.concurrency,
                request_count=arguments.requests,
                timeout_s=300,
            )
    print(f"{report.requests} requests, {report.responses} responses, {report.requests_per_second:.2f} requests/s")
    print(f"time to first response  {report.time_to_first_response_s * 1e3:8.0f} ms (median)")
    print(f"time between responses  {report.time_between_responses_s * 1e3:8.0f} ms (median)")
    print(provenance())


if __name__ == "__main__":
    main()

"""The command line. One function adds each subcommand's arguments and names the function that runs it.

`state_commands` and `trace_commands` hold those that work on what a server has learned, `train_commands` the one that
trains a drafter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from adaptive_verification import __version__
from adaptive_verification.errors import AdaptiveVerificationError
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.serving.launcher import RunningServer, ServerOptions, running_server
from adaptive_verification.serving.signals import interrupt_on_signals
from adaptive_verification.serving.state_commands import add_state
from adaptive_verification.serving.trace_commands import add_record, add_replay
from adaptive_verification.serving.train_commands import add_train_drafter
from adaptive_verification.settings import DEFAULT_PAIR, table_rows

PROGRAM = "adaptive-verification"
SHARED_SETTINGS = {
    "target": "model whose text is served: a directory, a hub name, or `default`",
    "drafter": "what proposes tokens: a drafter of `train-drafter`, a smaller model with the same tokenizer, "
    "`first-layers:N` of the target, or `lookup`",
    "dtype": "auto, float32, bfloat16 or float16",
    "device": "auto, cpu, cuda or cuda:N",
    "num_draft_tokens": "drafts per step and sequence, at most; 0 turns speculation off",
    "max_context_tokens": "longest prompt and output of one request together, in tokens",
}
"""Settings with an option of their own; all others are reached with --set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the exit code. An expected failure is one message on standard error, never a traceback."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Adaptive verification for speculative decoding, served by Triton Inference Server."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_serve, _add_prepare, _add_settings, add_state, add_record, add_replay, add_train_drafter):
        add(commands)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except AdaptiveVerificationError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
    return 0


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="start the server and run it until Ctrl-C",
        description="Starts tritonserver with the model repository and runs it until Ctrl-C or SIGTERM. "
        "Without options it serves the default pair on localhost.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=_serve)
    models = parser.add_argument_group("models", f"Defaults: `{PROGRAM} settings`.")
    for name, explanation in SHARED_SETTINGS.items():
        models.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=explanation)
    models.add_argument(
        "--set",
        action="append",
        type=_assignment,
        metavar="MODEL.SETTING=VALUE",
        help="any setting of one model, e.g. verifier.cache_slots=32; may be repeated",
    )
    models.add_argument("--model-repository", type=Path, metavar="DIR", help="use this repository instead of our own")

    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    network.add_argument("--http-port", type=_port, default=8000, metavar="PORT", help="0, here and below: any free")
    network.add_argument("--grpc-port", type=_port, default=8001, metavar="PORT", help="gRPC")
    network.add_argument("--metrics-port", type=_port, default=8002, metavar="PORT", help="Prometheus metrics")

    process = parser.add_argument_group("process")
    process.add_argument("--state-directory", type=Path, metavar="DIR", help="what the estimator learned, and logs")
    process.add_argument("--threads", type=_positive, metavar="N", help="threads of each stage (default: all cores)")
    process.add_argument(
        "--exit-timeout", type=_positive, default=30, metavar="SECONDS", help="for finishing requests when stopping"
    )
    process.add_argument("--verbose", action="store_true", help="show the server's whole log")


def _serve(parsed: argparse.Namespace) -> None:
    given = vars(parsed)
    model_settings: dict[str, dict[str, str]] = {}
    for model, name, value in given.get("set", ()):
        model_settings.setdefault(model, {})[name] = value
    options = ServerOptions(
        settings={name: given[name] for name in SHARED_SETTINGS if name in given},
        model_settings=model_settings,
        model_repository=given.get("model_repository"),
        state_directory=given.get("state_directory"),
        host=parsed.host,
        http_port=parsed.http_port,
        grpc_port=parsed.grpc_port,
        metrics_port=parsed.metrics_port,
        threads=given.get("threads"),
        exit_timeout_s=parsed.exit_timeout,
        verbose=given.get("verbose", False),
    )
    interrupt_on_signals()
    print("Starting tritonserver; loading and measuring the models can take a minute.", file=sys.stderr, flush=True)
    with running_server(options) as server:
        print(_welcome(server), flush=True)
        server.wait()


def _welcome(server: RunningServer) -> str:
    return f"""
Ready. The models are: {", ".join(server.models)}
  HTTP     {server.http_url}
  gRPC     {server.grpc_url}
  metrics  {server.metrics_url}
  log      {server.log_file}

Try:
  curl {server.http_url}/v2/models/generate/generate -d '{{"text_input": "The capital of France is", "max_tokens": 64}}'

Ctrl-C stops the server.
"""


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("prepare", help="fetch and convert the default pair, as `serve` does on first use")
    parser.set_defaults(run=lambda _: print(resolve_model(DEFAULT_PAIR)))


def _add_settings(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("settings", help="print every setting of every model, as a Markdown table")
    parser.set_defaults(run=lambda _: print(_settings_table()))


def _settings_table() -> str:
    rows = [f"| {model} | `{name}` | `{default}` | {text} |" for model, name, default, text in table_rows()]
    return "\n".join(["| model | setting | default | |", "|---|---|---|---|", *rows])


def _assignment(text: str) -> tuple[str, str, str]:
    name, equals, value = text.partition("=")
    model, dot, setting = name.partition(".")
    if not (equals and dot and model and setting):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MODEL.SETTING=VALUE")
    return model, setting, value


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not in 0..65535")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())

"""`adaptive-verification train-drafter`: a drafter for any target, trained on text that the target writes itself."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.serving.signals import interrupt_on_signals
from adaptive_verification.settings import DEFAULT_PAIR


def add_train_drafter(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train-drafter",
        help="train a drafter for a target",
        description="Lets the target write text, keeps its hidden states, trains a hidden-state drafter against its "
        "distributions, and writes the drafter with a report. On a GPU where there is one. Stopped at any time, the "
        "same command goes on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--target", default=DEFAULT_PAIR, help="model directory, hub name, or `default`")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the drafter is written")
    parser.add_argument("--work", type=Path, metavar="DIR", help="text and checkpoints (default: OUTPUT.work)")
    parser.add_argument("--minutes", type=float, required=True, help="in all, over all runs with one --work")
    prompts = parser.add_argument_group("text")
    prompts.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help='lines of {"prompt": "..."}, with "raw": true for text without chat template; a chat model can do without',
    )
    prompts.add_argument(
        "--held-out", type=Path, nargs="+", default=[], metavar="FILE.jsonl", help="for the report only"
    )
    prompts.add_argument("--collect-share", type=float, metavar="SHARE", help="of the minutes, for writing text")
    prompts.add_argument("--dialogue-share", type=float, metavar="SHARE", help="of sequences whose prompt it makes up")
    prompts.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="longer prompts are cut; held-out ones later"
    )
    prompts.add_argument("--max-new-tokens", type=int, metavar="N", help="of each turn")
    prompts.add_argument("--max-held-out", type=int, metavar="N", help="prompts used of each held-out file")
    prompts.add_argument("--rows", type=int, metavar="N", help="sequences written at once")
    network = parser.add_argument_group("network")
    network.add_argument(
        "--hidden-layers", type=int, nargs="+", metavar="L", help="whose states it takes; the last is one"
    )
    network.add_argument("--num-layers", type=int, metavar="N", help="decoder layers of its own")
    network.add_argument("--draft-vocabulary", type=int, metavar="N", help="tokens it can draft, the most frequent")
    network.add_argument("--learning-rate", type=float, metavar="RATE", help="the largest")
    network.add_argument("--seed", type=int, metavar="N", help="of shuffling and noise")
    network.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    network.add_argument("--dtype", metavar="TYPE", help="the target's, as the server will run it")
    parser.set_defaults(run=_train_drafter)


def _train_drafter(parsed: argparse.Namespace) -> None:
    from adaptive_verification.training.pipeline import DrafterTraining, TrainDrafterOptions  # torch takes seconds

    given = vars(parsed)
    chosen = {field.name: given[field.name] for field in fields(TrainDrafterOptions) if field.name in given}
    chosen["target"] = resolve_model(parsed.target)
    chosen.setdefault("work", parsed.output.with_name(parsed.output.name + ".work"))
    interrupt_on_signals()
    DrafterTraining(TrainDrafterOptions(**chosen)).run()
    print((parsed.output / "REPORT.md").read_text())
    print(f"Serve it: adaptive-verification serve --target {parsed.target} --drafter {parsed.output}", file=sys.stderr)

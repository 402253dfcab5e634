"""Adaptive verification against no speculation and fixed lengths, step by step in turn, in one process.

    python perf/arms_in_turn.py --concurrency 1 8 32
    python perf/arms_in_turn.py --arms k0 av --first-tokens 2000

The real stages and the real scheduler, without Triton and text. Every arm keeps so many requests going, the same ones
in the same order, and a new one begins as soon as one ends. A step of each arm follows one of the others, so that the
machine is as slow or as fast for all of them: where it changes by a third within a minute, as shared ones do, ratios
of a server's runs (perf/load.py) need many repeats, and these do not. What is not in it is what all arms have in
common: the way between the processes, and text.

Before it is measured every arm fills up and adaptive verification learns. Then follow `--rounds` rounds; the table has
medians over the rounds, and the ratio's range. With `--first-tokens` it begins anew in every round, having learned
nothing, and so many tokens of each arm are measured from the first step on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts
from tests.unit.generation.scripted import CollectingSink

from adaptive_verification.contract import LocalStep
from adaptive_verification.contract.step import Drafter
from adaptive_verification.drafting.hidden_state_kind import is_hidden_state_drafter
from adaptive_verification.drafting.loading import load_drafter
from adaptive_verification.estimation.cost_model import read_curves
from adaptive_verification.estimation.first_guess import read_first_guess
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.generation.request import GenerationRequest
from adaptive_verification.generation.sampling_parameters import SamplingParameters
from adaptive_verification.generation.scheduler import Scheduler
from adaptive_verification.generation.text_codec import TextCodec
from adaptive_verification.generation.text_stream import TextStream
from adaptive_verification.serving import environment
from adaptive_verification.serving.default_pair import resolve_drafter, resolve_model
from adaptive_verification.settings import DrafterSettings, EstimatorSettings, GenerateSettings, VerifierSettings
from adaptive_verification.verification.loading import load_verifier
from adaptive_verification.verification.stage import VerifierStage
from perf.as_served import restart_as_served
from perf.load_plan import ADAPTIVE, ARMS, MAX_DRAFT_TOKENS, NO_SPECULATION, SAMPLINGS, Arm
from perf.load_requests import Request, requests_of_round
from perf.provenance import publish

KEY = 1


class Lane:
    """One arm with its own sequences and estimator, over stages that all arms share."""

    def __init__(
        self,
        arm: Arm,
        drafter: Drafter,
        verifier: VerifierStage,
        codec: TextCodec,
        requests: Sequence[Request],
        sampling: dict[str, Any],
        concurrency: int,
    ) -> None:
        self.away_s = 0.0
        """Spent in other lanes, which this one's estimator must not take for its own."""
        self.begin_round()
        drafter_path = resolve_drafter("default", "default")
        estimator = EstimatorStage(
            EstimatorSettings.model_validate(dict(arm.estimator_settings)),
            evidence_key=KEY,
            curves=read_curves(environment.state_directory()),
            first_guess=read_first_guess(drafter_path),
            needs_states=is_hidden_state_drafter(drafter_path),
            clock=lambda: time.perf_counter() - self.away_s,
        )
        self._step = LocalStep(drafter, estimator, verifier)
        settings = GenerateSettings.model_validate({"num_draft_tokens": MAX_DRAFT_TOKENS})
        self._scheduler = Scheduler(settings, codec.end_token_ids(resolve_model("default")), KEY)
        self._requests = self._all_requests(arm, codec, requests, sampling)
        self._concurrency = concurrency
        self._codec = codec

    @staticmethod
    def _all_requests(
        arm: Arm, codec: TextCodec, requests: Sequence[Request], sampling: dict[str, Any]
    ) -> Iterator[GenerationRequest]:
        for number, request in enumerate(itertools.cycle(requests)):
            parameters = SamplingParameters(
                max_tokens=request.max_tokens, num_draft_tokens=arm.num_draft_tokens, seed=number,
                acceptance="rejection", **sampling,
            )  # fmt: skip
            chat = codec.render_chat([{"role": "user", "content": request.text}])
            yield GenerationRequest(codec.encode_rendered_chat(chat), parameters)

    def step(self) -> float:
        """One step; returns its seconds."""
        while self._scheduler.num_live + self._scheduler.num_waiting < self._concurrency:
            request = next(self._requests)
            stream = TextStream(request, self._codec.detokenizer(), CollectingSink())
            self._scheduler.enqueue(request, stream)
        started = time.perf_counter()
        step = self._scheduler.schedule()
        result = self._step(self._scheduler.step_request(step))
        self._scheduler.apply(step, result)
        seconds = time.perf_counter() - started
        self._scheduler.take_updates()
        self.tokens += result.output_tokens.numel()
        self.drafts += int(result.admitted_count.sum())
        self.steps += 1
        self.seconds += seconds
        return seconds

    def begin_round(self) -> None:
        self.tokens, self.drafts, self.steps, self.seconds = 0, 0, 0, 0.0


def in_turn(lanes: dict[str, Lane], steps: int, progress: tqdm[Any]) -> None:
    """So many steps of each."""
    for _ in range(steps):
        one_step_each(lanes)
        progress.update()


def one_step_each(lanes: dict[str, Lane]) -> None:
    for lane in lanes.values():
        seconds = lane.step()
        for other in lanes.values():
            other.away_s += seconds * (other is not lane)


class Results:
    """Of each arm, round by round."""

    def __init__(self, names: Sequence[str]) -> None:
        self._rates: dict[str, list[float]] = {name: [] for name in names}
        self._step_ms: dict[str, list[float]] = {name: [] for name in names}
        self._totals = {name: [0, 0, 0] for name in names}

    def add(self, lanes: dict[str, Lane]) -> None:
        for name, lane in lanes.items():
            self._rates[name].append(lane.tokens / lane.seconds)
            self._step_ms[name].append(1e3 * lane.seconds / lane.steps)
            counts = lane.tokens, lane.drafts, lane.steps
            self._totals[name] = [total + count for total, count in zip(self._totals[name], counts, strict=True)]

    def lines(self, title: str) -> list[str]:
        """Of the table; the ratios are within a round, to the best arm but adaptive verification."""
        others = [name for name in self._rates if name != ADAPTIVE]
        best = max(others, key=lambda name: statistics.median(self._rates[name]))
        lines = []
        for name, rates in self._rates.items():
            ratios = [own / other for own, other in zip(rates, self._rates[best], strict=True)]
            tokens, drafts, steps = self._totals[name]
            lines.append(
                f"| {title} | {name} | {statistics.median(rates):.1f} | {statistics.median(self._step_ms[name]):.1f} "
                f"| {tokens / steps:.2f} | {drafts / steps:.2f} "
                f"| {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) | {best} |"
            )
        return lines


def measure(lanes: dict[str, Lane], options: argparse.Namespace, title: str) -> list[str]:
    """The table's lines of one number of requests and one sampling, after learning."""
    results = Results(list(lanes))
    with tqdm(total=options.learning_steps + options.rounds * options.steps, unit="step", desc=title) as progress:
        in_turn(lanes, options.learning_steps, progress)
        for _ in range(options.rounds):
            for lane in lanes.values():
                lane.begin_round()
            in_turn(lanes, options.steps, progress)
            results.add(lanes)
    return results.lines(title)


def measure_first(new_lanes: Callable[[], dict[str, Lane]], options: argparse.Namespace, title: str) -> list[str]:
    """The same of the first tokens, without learning."""
    results = Results(options.arms)
    total = options.rounds * len(options.arms) * options.first_tokens
    with tqdm(total=total, unit="token", desc=title) as progress:
        for _ in range(options.rounds):
            lanes = new_lanes()
            while unfinished := {name: lane for name, lane in lanes.items() if lane.tokens < options.first_tokens}:
                before = sum(lane.tokens for lane in lanes.values())
                one_step_each(unfinished)
                progress.update(sum(lane.tokens for lane in lanes.values()) - before)
            results.add(lanes)
    return results.lines(title)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=[NO_SPECULATION, "k1", "k2", ADAPTIVE], metavar="ARM"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at a time (1 8 32)")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), metavar="SAMPLING")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="output tokens of a request, at most, on average (128)"
    )
    parser.add_argument("--learning-steps", type=int, default=150, help="of each arm, before it is measured (150)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--steps", type=int, default=100, help="of each arm in a round (100)")
    parser.add_argument("--first-tokens", type=int, default=0, help="measure so many of each arm, without learning (0)")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    return parser.parse_args()


def _new_lanes(
    drafter: Drafter,
    verifier: VerifierStage,
    codec: TextCodec,
    texts: Sequence[str],
    sampling: dict[str, Any],
    options: argparse.Namespace,
    concurrency: int,
) -> dict[str, Lane]:
    # of all lengths, and some begun before: else no request of an arm without speculation would end for many steps,
    # and then all of them at once
    requests = requests_of_round(texts, options.max_tokens, concurrency, random.Random(0))
    return {name: Lane(ARMS[name], drafter, verifier, codec, requests, sampling, concurrency) for name in options.arms}


def main() -> None:
    restart_as_served()
    options = parse_arguments()
    # the lanes serve the same prompts, and none may find computed what another one did
    settings = {"cache_slots": len(options.arms) * max(options.concurrency), "prefix_caching": False}
    verifier = load_verifier(VerifierSettings.model_validate(settings))
    drafter = load_drafter(DrafterSettings.model_validate(settings))
    codec = TextCodec.from_pretrained(resolve_model("default"))
    texts = prompts(512, seed=0)
    lines = [
        "| requests, sampling | arm | tokens/s | step ms | tokens/step | verified/step | over the best other | it |",
        "|---" * 8 + "|",
    ]
    for concurrency in options.concurrency:
        for sampling in options.samplings:
            new_lanes = functools.partial(
                _new_lanes, drafter, verifier, codec, texts, dict(SAMPLINGS[sampling]), options, concurrency
            )
            title = f"{concurrency}, {sampling}"
            if options.first_tokens:
                lines += measure_first(new_lanes, options, title)
            else:
                lines += measure(new_lanes(), options, title)
    publish(lines, options.output)


if __name__ == "__main__":
    main()

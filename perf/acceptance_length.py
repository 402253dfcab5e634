"""Tokens per step with the two ways of acceptance, on the same prompts and the same pair, and what deciding costs.

    python perf/acceptance_length.py --drafters first-layers:6 first-layers:24

Runs the real stages in this process, without Triton. Everything that is drafted is verified, so a step's tokens are one
more than its accepted drafts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts
from tests.step_requests import RequestRow, step_request

from adaptive_verification.contract import COUPLED, REJECTION, Draft, Estimate, LocalStep, StepRequest
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.loading import model_options, vocabulary_size
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.settings import ModelSettings
from adaptive_verification.verification import stage
from adaptive_verification.verification.acceptance import Accepted, accept
from adaptive_verification.verification.block import Block
from perf.provenance import provenance

METHODS = {"rejection": REJECTION, "coupled": COUPLED}


class AdmitAll:
    """Stands where the estimator stands."""

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        return Estimate(draft.drafted_count, draft.drafted_count, torch.zeros(1))


class Stopwatch:
    """Milliseconds spent in deciding, and decided positions."""

    def __init__(self) -> None:
        self.ms, self.positions = 0.0, 0

    def __call__(self, logits: torch.Tensor, block: Block) -> Accepted:
        started = time.perf_counter()
        outcome = accept(logits, block)
        self.ms += (time.perf_counter() - started) * 1e3
        self.positions += len(logits)
        return outcome


def tokens_per_step(
    step: LocalStep, texts: list[list[int]], *, method: int, drafts: int, steps: int, temperature: float, top_p: float
) -> float:
    """Over all texts, each continued for so many steps."""
    tokens = [list(text) for text in texts]
    confirmed = [0] * len(tokens)
    for _ in range(steps):
        rows = [
            RequestRow(i, known, text[known:], drafts, temperature, top_p, seed=i, acceptance=method)
            for i, (text, known) in enumerate(zip(tokens, confirmed, strict=True))
        ]
        result = step(step_request(rows))
        confirmed = [len(text) for text in tokens]
        for text, output in zip(tokens, result.output_tokens.split(result.output_count.tolist()), strict=True):
            text += output.tolist()
    step(step_request([], release=range(len(texts))))
    return (sum(map(len, tokens)) - sum(map(len, texts))) / (len(texts) * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--drafters", nargs="+", default=["first-layers:6"], help="first-layers:N, a directory or name")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()

    target = resolve_model(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [tokenizer(text)["input_ids"][:64] for text in prompts(arguments.rows)]
    options = model_options(ModelSettings(target=target, cache_slots=arguments.rows, max_context_tokens=1024))
    verifier = stage.VerifierStage(CausalModel.load(target, options), idle_seconds=1e9)
    lines = ["| drafter | temperature | top-p | acceptance | tokens/step | µs/position |", "|---|---|---|---|---|---|"]
    for name in tqdm(arguments.drafters, unit="drafter"):
        kind, _, layers = name.partition(":")
        num_layers = int(layers) if kind == "first-layers" else None
        drafter = CausalDrafter(
            CausalModel.load(target if num_layers else resolve_model(name), options, num_layers=num_layers),
            target_vocab_size=vocabulary_size(target),
            idle_seconds=1e9,
            draft_top_k=64,
            max_catch_up_tokens=100_000,
        )
        step = LocalStep(drafter, AdmitAll(), verifier)
        for temperature, top_p in ((1.0, 1.0), (1.0, 0.95), (0.6, 1.0)):
            for method_name, method in METHODS.items():
                stopwatch = Stopwatch()
                with patch.object(stage, "accept", stopwatch):
                    length = tokens_per_step(
                        step,
                        texts,
                        method=method,
                        drafts=arguments.num_draft_tokens,
                        steps=arguments.steps,
                        temperature=temperature,
                        top_p=top_p,
                    )
                cost = stopwatch.ms / stopwatch.positions * 1e3
                lines.append(f"| {name} | {temperature} | {top_p} | {method_name} | {length:.2f} | {cost:.0f} |")
    print("\n".join(lines), f"\n{provenance()}", sep="\n")


if __name__ == "__main__":
    main()

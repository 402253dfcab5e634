"""How often looked-up drafts are accepted, by the length of their match: whence `lookup_min_match` and the prior.

    python perf/lookup_acceptance.py

Runs the real stages in this process, without Triton or a drafting model. Every match of at least one token is drafted
from, and everything that is drafted is verified. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import prompts
from tests.step_requests import RequestRow, step_request

from adaptive_verification.contract import Draft, Estimate, LocalStep, StepRequest
from adaptive_verification.drafting.lookup_stage import LookupDrafter
from adaptive_verification.estimation.lookup_rates import MATCH_LENGTHS
from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.loading import model_options, vocabulary_size
from adaptive_verification.generation.text_codec import TextCodec
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.settings import ModelSettings
from adaptive_verification.verification.stage import VerifierStage
from perf.provenance import provenance


class AdmitAll:
    """Stands where the estimator stands, and keeps the step's match lengths."""

    def __init__(self) -> None:
        self.match_length: list[int] = []

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        self.match_length = draft.draft_match_length.tolist()
        return Estimate(draft.drafted_count, draft.drafted_count, torch.zeros(1))


@dataclass
class Text:
    tokens: list[int]
    end: int
    """The length at which to stop."""
    confirmed: int = 0


@dataclass
class Counts:
    """By match length (`MATCH_LENGTHS`) and position."""

    num_drafts: int
    blocks: NDArray[np.int64] = field(init=False)
    accepted: NDArray[np.int64] = field(init=False)
    decided: NDArray[np.int64] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.blocks = np.zeros(len(MATCH_LENGTHS), dtype=np.int64)
        self.accepted, self.decided = np.zeros((2, len(MATCH_LENGTHS), self.num_drafts), dtype=np.int64)

    def add(self, match_length: int, num_accepted: int) -> None:
        self.steps += 1
        if match_length:
            bucket = np.searchsorted(MATCH_LENGTHS, match_length, side="right") - 1
            self.blocks[bucket] += 1
            self.accepted[bucket, :num_accepted] += 1
            self.decided[bucket, : num_accepted + 1] += 1

    def rows(self) -> list[str]:
        lines = []
        for bucket, shortest in enumerate(MATCH_LENGTHS):
            blocks = self.blocks[bucket]
            if blocks:
                rates = [
                    f"{accepted / decided:.2f}" if decided else ""
                    for accepted, decided in zip(self.accepted[bucket], self.decided[bucket], strict=True)
                ]
                mean = self.accepted[bucket].sum() / blocks
                share = blocks / self.steps
                lines.append(f"{shortest} | {blocks} | {share:.2f} | {' | '.join(rates)} | {mean:.2f} |")
        return lines


def decode(
    step: LocalStep, estimator: AdmitAll, texts: list[Text], ends: frozenset[int], counts: Counts, t: float
) -> None:
    """Continues all texts to their ends at temperature `t`."""
    live = dict(enumerate(texts))
    while live:
        rows = [
            RequestRow(i, text.confirmed, text.tokens[text.confirmed :], counts.num_drafts, temperature=t, seed=i)
            for i, text in live.items()
        ]
        result = step(step_request(rows))
        outputs = result.output_tokens.split(result.output_count.tolist())
        for i, output, match_length in zip(list(live), outputs, estimator.match_length, strict=True):
            text = live[i]
            counts.add(match_length, len(output) - 1)
            text.confirmed = len(text.tokens)
            text.tokens += output.tolist()
            if ends & set(output.tolist()) or len(text.tokens) >= text.end:
                del live[i]
    step(step_request([], release=range(len(texts))))


def _as_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="default")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=160, help="output tokens of each text, at most (160)")
    arguments = parser.parse_args()

    target = resolve_model(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    options = model_options(ModelSettings(target=target, cache_slots=arguments.prompts, max_context_tokens=1536))
    drafter = LookupDrafter(
        None,
        min_match=1,
        num_slots=arguments.prompts,
        capacity=1536,
        idle_seconds=1e9,
        vocab_size=vocabulary_size(target),
    )
    estimator = AdmitAll()
    step = LocalStep(drafter, estimator, VerifierStage(CausalModel.load(target, options), idle_seconds=1e9))
    end_tokens = TextCodec.from_pretrained(target).end_token_ids(target)
    chats = [
        tokenizer(_as_chat(tokenizer, text))["input_ids"]
        for text in prompts(arguments.prompts, max_characters=4000, seed=0)
    ]
    positions = " | ".join(map(str, range(1, arguments.num_draft_tokens + 1)))
    lines = [
        "Acceptance by draft position, given that all drafts before it were accepted.\n",
        f"| temperature | match from | blocks | of all steps | {positions} | accepted drafts |",
        "|---" * (arguments.num_draft_tokens + 5) + "|",
    ]
    for temperature in tqdm((0.0, 0.6, 1.0), unit="temperature"):
        counts = Counts(arguments.num_draft_tokens)
        texts = [Text(list(chat), len(chat) + arguments.tokens) for chat in chats]
        decode(step, estimator, texts, end_tokens, counts, temperature)
        lines += [f"| {temperature} | {row}" for row in counts.rows()]
    print("\n".join(lines), f"\n{provenance()}", sep="\n")


if __name__ == "__main__":
    main()

"""The verifier's whole step against the bare forward of as many tokens: what packing and acceptance add to arithmetic.

    python perf/verify.py --prompts ../shared/data/gsm8k.jsonl --shapes 1x1x100 64x1x300 --output perf/results/verify.md

A shape is rows x tokens of each x cached tokens of each, as in `perf/forward.py`; of a row's tokens all but the first
are drafts, namely how its text goes on, so that the target accepts some of them. "Bare" is the unmodified model on that
many tokens of one sequence, without a cache. The step is everything between a request and its result: packing,
attention, cache, logits, acceptance, hidden states. All arms of a shape are interleaved and repeated; the numbers are
medians in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.step_requests import RequestRow, step_request

from adaptive_verification.contract import Draft, DraftCost, Estimate, StepRequest
from adaptive_verification.forward.loading import model_options
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.settings import VerifierSettings
from adaptive_verification.training.jobs import read_prompts
from adaptive_verification.verification.loading import load_verifier
from perf.as_served import restart_as_served
from perf.forward import add_shape_options, medians, query_lengths
from perf.provenance import publish

SHAPES = ("1x1x100", "1x4x100", "8x1x100", "8x4x100", "64x1x115", "64x1x300", "64x4x300", "64x1-5x300")
SAMPLINGS = {"greedy": (0.0, 1.0), "temperature 1": (1.0, 1.0), "top-p 0.95": (1.0, 0.95)}
_CANDIDATES = 64
"""A draft's distribution has so many, most of it on the draft."""


def texts(prompts: list[Path], tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """So many token sequences of that length, each beginning elsewhere in the prompts' text."""
    tokens: list[int] = tokenizer("\n\n".join(text for text, _ in read_prompts(prompts)))["input_ids"]
    while len(tokens) < count * length:
        tokens += tokens
    return [tokens[row * length : (row + 1) * length] for row in range(count)]


def request(rows: list[list[int]], cached: int, sampling: tuple[float, float], drafts: list[int]) -> StepRequest:
    """A step of the rows, which consist of `cached` tokens that were sent before, and new ones."""
    return step_request(
        [
            RequestRow(i, cached, row[cached:], draft_limit, *sampling, seed=i)
            for i, (row, draft_limit) in enumerate(zip(rows, drafts, strict=True))
        ]
    )


def proposal(drafts: list[list[int]], vocab_size: int) -> tuple[Draft, Estimate]:
    """These drafts, all admitted."""
    counts = torch.tensor([len(row) for row in drafts], dtype=torch.int32)
    tokens = torch.tensor([token for row in drafts for token in row], dtype=torch.int32)
    others = (tokens[:, None] + torch.arange(1, _CANDIDATES)) % vocab_size
    probs = torch.cat([torch.full((len(tokens), 1), 0.5), torch.full(others.shape, 0.5 / (_CANDIDATES - 1))], dim=1)
    draft = Draft(
        drafted_count=counts,
        draft_status=torch.zeros_like(counts),
        draft_match_length=torch.zeros_like(counts),
        draft_tokens=tokens,
        draft_log_odds=torch.zeros(len(tokens)),
        draft_features=torch.empty(0),
        candidate_count=torch.full_like(tokens, _CANDIDATES),
        candidate_ids=torch.cat([tokens[:, None], others], dim=1).flatten().to(torch.int32),
        candidate_probs=probs.flatten(),
        draft_cost=DraftCost.nothing().to_tensor(),
    ).validate()
    return draft, Estimate(counts, counts, torch.zeros(1)).validate()


class Step:
    """The same step again and again: the rows' last token is another each time, so it is computed each time."""

    def __init__(self, stage: Any, rows: list[list[int]], cached: int, lengths: list[int], vocab_size: int) -> None:
        self._stage, self._rows, self._cached = stage, rows, cached
        self._drafts = [row[cached + 1 : cached + length] for row, length in zip(rows, lengths, strict=True)]
        self._draft, self._estimate = proposal(self._drafts, vocab_size)
        self._newest = cycle((0, 1))
        self.accepted_share = float("nan")

    def prefill(self) -> None:
        nothing, admit_nothing = proposal([[] for _ in self._rows], vocab_size=1)
        before = [row[: self._cached] for row in self._rows]
        self._stage.step(request(before, 0, (0.0, 1.0), [-1] * len(before)), nothing, admit_nothing)

    def run(self, sampling: tuple[float, float]) -> Callable[[], object]:
        """The step with this sampling, to be called."""

        def step() -> object:
            place = self._cached + next(self._newest)  # the next token of the text, or the one after it
            rows = [[*row[: self._cached], row[place]] for row in self._rows]
            asked = request(rows, self._cached, sampling, [len(drafts) for drafts in self._drafts])
            result = self._stage.step(asked, self._draft, self._estimate)
            drafts = int(self._draft.drafted_count.sum())
            if place == self._cached and drafts:
                self.accepted_share = float(result.output_count.sum() - len(rows)) / drafts
            return result

        return step


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help='JSONL files with a "prompt" a line')
    add_shape_options(parser, SHAPES)
    arguments = parser.parse_args()

    restart_as_served()
    settings = VerifierSettings(target=arguments.target, cache_slots=64, max_context_tokens=512)
    stage = load_verifier(settings)
    target, options = resolve_model(settings.target), model_options(settings)
    bare: Any = AutoModelForCausalLM.from_pretrained(target, dtype=options.dtype)
    bare.to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = [
        f"| rows | tokens each | context | bare | {' | '.join(SAMPLINGS)} | "
        f"{' | '.join(f'{name} / bare' for name in SAMPLINGS)} | drafts accepted |",
        "|---" * (5 + 2 * len(SAMPLINGS)) + "|",
    ]
    for shape in tqdm(arguments.shapes, unit="shape"):
        lengths, cached = query_lengths(shape)
        rows = texts(arguments.prompts, tokenizer, len(lengths), cached + max(lengths) + 1)
        step = Step(stage, rows, cached, lengths, bare.config.vocab_size)
        step.prefill()
        tokens = torch.tensor([(rows[0] * sum(lengths))[: sum(lengths)]], device=options.device)

        def run_bare(tokens: torch.Tensor = tokens) -> object:
            return bare(input_ids=tokens, use_cache=False).logits[0, :, 0].cpu()  # as the step, it waits for a GPU

        arms = {"bare": run_bare, **{name: step.run(sampling) for name, sampling in SAMPLINGS.items()}}
        times = medians(arms, arguments.repeats)
        cells = [f"{value:.0f}" for value in times.values()]
        cells += [f"{times[name] / times['bare']:.2f}" for name in SAMPLINGS]
        lines.append(f"| {' | '.join(shape.split('x'))} | {' | '.join(cells)} | {step.accepted_share:.2f} |")
    publish(lines, arguments.output)


if __name__ == "__main__":
    main()

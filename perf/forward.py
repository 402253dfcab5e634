"""The target's packed forward against the bare one of as many tokens, with every way of computing linear layers.

    python perf/forward.py --shapes 1x1x100 1x4x100 64x1x300 --output perf/results/forward.md

A shape is rows x tokens of each x cached tokens of each; 64x1-5x300 has rows of 1, 2, 3, 4, 5, 1, 2, ... tokens.
"Bare" is the unmodified model on that many tokens of one sequence, without a cache; the others are the packed forward,
with attention and cache, and logits after every token, its linear layers computed in the ways of `forward.linear`. All
arms of a shape are interleaved and repeated; the numbers are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from adaptive_verification.forward import linear
from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.forward.loading import model_options
from adaptive_verification.forward.row import Row
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.settings import ModelSettings
from perf.as_served import restart_as_served
from perf.provenance import publish

SHAPES = ("1x1x100", "1x2x100", "1x4x100", "1x8x100", "8x1x100", "8x4x100", "64x1x115", "64x1x300", "64x4x300",
          "64x1-5x300")  # fmt: skip


WAYS = {
    torch.float32: ("plain", "transposed", "float16_weights"),
    torch.bfloat16: ("plain", "packed", "streamed"),
    torch.float16: ("plain", "transposed"),
}
"""Of computing linear layers, by the weights' type."""


def options_of(target: str) -> ModelOptions:
    """As it is served here, with room for the shapes."""
    return model_options(ModelSettings(target=target, cache_slots=64, max_context_tokens=512))


def load(target: str, way: str) -> CausalModel:
    """The packed model with its linear layers computed that way, whatever is faster here."""
    with patch.object(linear, "fastest_way", lambda linears: way):
        return CausalModel.load(target, options_of(target))


def query_lengths(shape: str) -> tuple[list[int], int]:
    """Of a shape as on the command line: the rows' tokens, and how many are cached of each."""
    num_rows, tokens, context_length = shape.split("x")
    shortest, _, longest = tokens.partition("-")
    lengths = range(int(shortest), int(longest or shortest) + 1)
    return [lengths[row % len(lengths)] for row in range(int(num_rows))], int(context_length)


def packed(model: CausalModel, lengths: list[int], context_length: int) -> Callable[[], object]:
    rows = [Row(slot, context_length, length) for slot, length in enumerate(lengths)]
    places = torch.arange(sum(lengths), device=model.device)
    return lambda: model.forward(torch.ones(sum(lengths), dtype=torch.int64), rows, places)[:, 0].cpu()


def medians(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each arm, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, run in arms.items():
            started = time.perf_counter()
            run()
            if repeat:  # the first warms up
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def add_shape_options(parser: argparse.ArgumentParser, shapes: Sequence[str]) -> None:
    """The options of a study over shapes of a packed forward."""
    parser.add_argument("--target", default="default")
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="ROWSxTOKENSxCONTEXT")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the table to this file as well")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, SHAPES)
    arguments = parser.parse_args()

    restart_as_served()
    target = resolve_model(arguments.target)
    options = options_of(target)
    models = {way: load(target, way) for way in WAYS[options.dtype]}
    bare: Any = AutoModelForCausalLM.from_pretrained(target, dtype=options.dtype)
    bare.to(options.device).eval()
    ways = " | ".join(models)
    ratios_to_bare = " | ".join(f"{way} / bare" for way in models)
    lines = [
        f"| rows | tokens each | context | bare | {ways} | {ratios_to_bare} |",
        "|---" * (4 + 2 * len(models)) + "|",
    ]
    for shape in tqdm(arguments.shapes, unit="shape"):
        lengths, context_length = query_lengths(shape)
        tokens = torch.ones(1, sum(lengths), dtype=torch.int64, device=options.device)

        def run_bare(tokens: torch.Tensor = tokens) -> torch.Tensor:
            logits: torch.Tensor = bare(input_ids=tokens, use_cache=False).logits
            return logits[0, :, 0].cpu()

        packed_arms = {way: packed(model, lengths, context_length) for way, model in models.items()}
        times = medians({"bare": run_bare, **packed_arms}, arguments.repeats)
        ratios = [times[way] / times["bare"] for way in models]
        cells = [f"{value:.0f}" for value in times.values()] + [f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {' | '.join(shape.split('x'))} | " + " | ".join(cells) + " |")
    publish(lines, arguments.output)


if __name__ == "__main__":
    main()

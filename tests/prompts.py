"""Prompts for tests and benchmarks: the shared data sets where they are, else the project's own few."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

DATA_VARIABLE = "ADAPTIVE_VERIFICATION_DATA"
"""Names the folder of prompt files. Default: `../shared/data` beside the checkout."""
OWN_PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "Translate to French: Good morning, my friend.",
    "A train travels 60 miles in an hour. How far does it go in 150 minutes?",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8, 13,",
    "The opposite of hot is",
    "import numpy as np\n\narray =",
    "In 1969, the first human",
    "She opened the door and",
    "Ingredients: flour, sugar, butter,",
    "Photosynthesis is the process by which",
    "To be, or not to be,",
    "Q: What is the largest planet?\nA:",
    "SELECT name FROM users WHERE",
    "Roses are red, violets are",
    "The quick brown fox",
)


def data_directory() -> Path:
    """Where the shared prompt files would be; the folder need not exist."""
    default = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get(DATA_VARIABLE, default))


def prompts(
    count: int, max_characters: int = 600, *, files: Iterable[Path] | None = None, seed: int | None = None
) -> list[str]:
    """`count` prompts, from the files in turn, repeated as needed.

    Args:
        count: how many.
        max_characters: longer prompts are left out.
        files: JSON lines with a `prompt` each. Default: all shared sets, or where there are none, the project's own.
        seed: shuffles each file's prompts; None: they keep their order.
    """
    sets = []
    for path in sorted(data_directory().glob("*.jsonl")) if files is None else files:
        texts = [_text(json.loads(line)) for line in path.read_text().splitlines()]
        sets.append([text for text in texts if len(text) <= max_characters])
    sets = [texts for texts in sets if texts]
    if not sets:
        sets = [list(OWN_PROMPTS)]
    if seed is not None:
        for texts in sets:
            random.Random(seed).shuffle(texts)
    return [sets[i % len(sets)][i // len(sets) % len(sets[i % len(sets)])] for i in range(count)]


def _text(entry: dict[str, object]) -> str:
    text = entry["prompt"]
    return text if isinstance(text, str) else str(text)

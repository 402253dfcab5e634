"""How a peer's program is spoken to: a batch of requests per line in, what it took per line out.

Standard library only: it is imported in every peer's own environment.

A batch is `{"prompts": [...], "concurrency": n, "temperature": t, "top_p": p, "max_tokens": m, "seed": s}`; the prompts
are users' turns, to be put into the model's chat template, and at most n of them may be in progress at a time. The
answer is `{"output_tokens": ..., "duration_s": ...}` or `{"error": "..."}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Batch = dict[str, Any]


def serve(load: Callable[[], Callable[[Batch], int]]) -> None:
    """Answers batches until the input ends.

    Args:
        load: makes the function that does one batch and returns its number of output tokens.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print, while they load or later, is no answer
    generate = load()
    for line in sys.stdin:
        started = time.perf_counter()
        try:
            output_tokens = generate(json.loads(line))
            answer: dict[str, Any] = {"output_tokens": output_tokens, "duration_s": time.perf_counter() - started}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def waves(batch: Batch) -> Iterator[list[str]]:
    """The prompts, `concurrency` at a time."""
    size = batch["concurrency"]
    for start in range(0, len(batch["prompts"]), size):
        yield batch["prompts"][start : start + size]

"""Which requests a run's streams send: the same ones for every arm, of mixed length, out of phase from the start.

If all began together and were equally long, they would end together, again and again: a window would hold one wave's
prompts or none.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple


class Request(NamedTuple):
    text: str
    max_tokens: int


def requests_of_round(texts: Sequence[str], max_tokens: int, concurrency: int, rng: random.Random) -> list[Request]:
    """Every text once (or as often as it takes to give each stream one), in a random order.

    Args:
        texts: prompts.
        max_tokens: mean of the requests' own, which are spread from a half of it to one and a half.
        concurrency: streams. As many requests, the first, are cut to 1/n, 2/n ... of `max_tokens`: each stream begins
            as though its request had been going on for a while.
        rng: decides order and lengths.
    """
    shuffled = rng.sample(texts, len(texts))
    cut = [max(1, max_tokens * (stream + 1) // concurrency) for stream in range(concurrency)]
    rng.shuffle(cut)
    shortest, longest = max(1, max_tokens // 2), max_tokens + max_tokens // 2
    lengths = cut + [rng.randint(shortest, longest) for _ in range(len(texts) - concurrency)]
    return [Request(text, length) for text, length in zip(itertools.cycle(shuffled), lengths, strict=False)]


def ramp_up_tokens(concurrency: int, max_tokens: int) -> int:
    """Output tokens of all streams together until every prompt of the beginning has been read, and about half of the
    streams are at a second request."""
    return concurrency * max_tokens // 2

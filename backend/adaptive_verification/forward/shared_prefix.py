"""The longest beginning that a sequence shares with others, whose keys and values it can then copy.

Keys and values at a position depend on the tokens up to it alone, so those of another sequence are as good as one's own
where all tokens up to there are equal. Pure bookkeeping over token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def longest_shared_prefix(
    tokens: Sequence[int], others: Iterable[tuple[int, Sequence[int]]], more_than: int
) -> tuple[int, int] | None:
    """The (name, shared tokens) of the first of the others that shares the most, or None.

    Args:
        others: (name, tokens) of each.
        more_than: who shares fewer tokens or just so many is passed over.
    """
    best: tuple[int, int] | None = None
    longest = more_than
    for name, other in others:
        if tokens[: longest + 1] == other[: longest + 1] and len(tokens) > longest < len(other):
            longest = _shared_length(tokens, other, longest + 1)
            best = name, longest
    return best


def _shared_length(a: Sequence[int], b: Sequence[int], equal: int) -> int:
    """How many first tokens are equal, of which `equal` are known to be. Halving: slices compare faster than a loop."""
    end = min(len(a), len(b))
    while equal < end:
        middle = (equal + end + 1) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            end = middle - 1
    return equal

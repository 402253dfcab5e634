"""Who shares the longest beginning."""

from __future__ import annotations

import random

from adaptive_verification.forward.shared_prefix import longest_shared_prefix


def test_the_one_that_shares_most_is_found_and_the_first_of_equals() -> None:
    others = [(7, [1, 2, 9]), (8, [1, 2, 3, 9]), (9, [1, 2, 3, 8]), (10, [2, 2, 3, 4])]
    assert longest_shared_prefix([1, 2, 3, 4], others, more_than=0) == (8, 3)


def test_who_shares_no_more_than_asked_is_passed_over() -> None:
    assert longest_shared_prefix([1, 2, 3, 4], [(7, [1, 2, 9])], more_than=2) is None
    assert longest_shared_prefix([1, 2, 3, 4], [(7, [1, 2, 9])], more_than=1) == (7, 2)
    assert longest_shared_prefix([1, 2], [(7, [1, 2, 3])], more_than=2) is None
    assert longest_shared_prefix([], [(7, [1])], more_than=0) is None


def test_it_counts_as_a_loop_over_the_tokens_does() -> None:
    rng = random.Random(0)
    for _ in range(300):
        texts = [[rng.randrange(2) for _ in range(rng.randrange(12))] for _ in range(5)]
        tokens, others = texts[0], list(enumerate(texts[1:]))
        more_than = rng.randrange(3)
        shared = [
            next(
                (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
            )
            for _, other in others
        ]
        best = max(shared)
        expected = (shared.index(best), best) if best > more_than else None
        assert longest_shared_prefix(tokens, others, more_than) == expected

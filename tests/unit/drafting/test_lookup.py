"""The index against the definition: all earlier places, compared token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_verification.drafting import lookup
from adaptive_verification.drafting.lookup import LookupIndex, Match

tokens = st.lists(st.integers(0, 2), max_size=40)


def longest_match(sequence: list[int], min_match: int, max_match: int) -> Match | None:
    """Every earlier place, most recent first."""
    best = None
    for end in range(len(sequence) - 1, 0, -1):
        length = 0
        while length < min(end, max_match) and sequence[end - length - 1] == sequence[-length - 1]:
            length += 1
        if length >= min_match and (best is None or length > best.length):
            best = Match(end, length)
    return best


def index_of(sequence: list[int], min_match: int = 2, max_match: int = 5) -> LookupIndex:
    index = LookupIndex(min_match, max_match)
    index.confirm(0, sequence)
    return index


@given(tokens, st.integers(1, 4), st.integers(0, 5))
def test_the_match_is_the_most_recent_of_the_longest(sequence: list[int], min_match: int, more: int) -> None:
    index = index_of(sequence, min_match, min_match + more)
    assert index.longest_match() == longest_match(sequence, min_match, min_match + more)


@given(st.lists(st.tuples(st.floats(0, 1), tokens), max_size=8))
def test_after_any_cuts_and_additions_it_is_that_of_the_tokens_then_confirmed(
    confirmations: list[tuple[float, list[int]]],
) -> None:
    index = LookupIndex(2, 5)
    sequence: list[int] = []
    for share, added in confirmations:
        context_length = round(share * len(sequence))
        sequence = sequence[:context_length] + added
        index.confirm(context_length, added)
        assert index.longest_match() == longest_match(sequence, 2, 5)
    assert vars(index) == vars(index_of(sequence))


@pytest.mark.parametrize("sequence", [[], [1], [1, 2], [1, 1], [1, 2, 3, 4, 5, 6]])
def test_nothing_repeated_is_no_match(sequence: list[int]) -> None:
    assert index_of(sequence).longest_match() is None


@given(tokens, st.integers(1, 12))
def test_the_continuation_is_what_copying_token_after_token_gives(sequence: list[int], count: int) -> None:
    index = index_of(sequence)
    match = index.longest_match()
    if match is None:
        return
    copied = list(sequence)
    for i in range(count):
        copied.append(copied[match.end + i])
    assert index.continuation(match, count) == copied[len(sequence) :]


def test_of_too_many_occurrences_the_most_recent_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_OCCURRENCES", 2)
    sequence = [9, 1, 2, 5, 1, 2, 6, 1, 2, 9, 1, 2]
    assert index_of(sequence).longest_match() == Match(end=9, length=2)
    monkeypatch.setattr(lookup, "MOST_OCCURRENCES", 3)
    assert index_of(sequence).longest_match() == Match(end=3, length=3)

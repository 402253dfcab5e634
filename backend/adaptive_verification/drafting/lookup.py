"""Where a sequence's last tokens have occurred before in it: what followed them there is drafted now.

Prompt lookup: no model, so no cost but its verification. Knows one sequence's tokens; no requests, no tensors.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_OCCURRENCES = 256
"""Earlier occurrences that a search looks at, the most recent ones: a text of nothing but repetitions has thousands,
and the last few of them say what goes on."""


class Match(NamedTuple):
    """An earlier occurrence of the sequence's last `length` tokens."""

    end: int
    """The position after the occurrence: the token there is the first to draft."""
    length: int


class LookupIndex:
    """One sequence's tokens, and where each run of `min_match` of them has occurred.

    A new token costs one dictionary entry, whatever the sequence's length.

    Args:
        min_match: shorter matches are none.
        max_match: longer ones are as good as this; at least `min_match`.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._tokens: list[int] = []
        self._latest_end: dict[tuple[int, ...], int] = {}
        """Run of tokens -> the position after its latest occurrence."""
        self._earlier_end: list[int] = []
        """For each position after a run, from `min_match` on: where the same run ended before; 0: nowhere."""

    def confirm(self, context_length: int, tokens: list[int]) -> None:
        """Takes the caller's tokens as the truth: the first `context_length` known ones, then these."""
        self._cut_back(context_length)
        self._tokens += tokens
        for end in range(self._min_match + len(self._earlier_end), len(self._tokens) + 1):
            run = tuple(self._tokens[end - self._min_match : end])
            self._earlier_end.append(self._latest_end.get(run, 0))
            self._latest_end[run] = end

    def _cut_back(self, length: int) -> None:
        while len(self._earlier_end) > max(0, length - self._min_match + 1):
            end = self._min_match + len(self._earlier_end) - 1
            run = tuple(self._tokens[end - self._min_match : end])
            earlier_end = self._earlier_end.pop()
            if earlier_end:
                self._latest_end[run] = earlier_end
            else:
                del self._latest_end[run]
        del self._tokens[length:]

    def longest_match(self) -> Match | None:
        """The longest earlier occurrence of the last tokens, the most recent of equally long ones.

        It may overlap them: what repeats every p tokens is found p tokens back. None where there is none of at least
        `min_match` tokens.
        """
        end = self._previous_end(len(self._tokens))
        best: Match | None = None
        for _ in range(MOST_OCCURRENCES):
            if not end:
                break
            length = self._match_length(end)
            if best is None or length > best.length:
                best = Match(end, length)
                if length == self._max_match:
                    break
            end = self._previous_end(end)
        return best

    def continuation(self, match: Match, count: int) -> list[int]:
        """What followed the match, `count` tokens; where the sequence ends, it goes on with what was read so far."""
        period = self._tokens[match.end :]
        return [period[i % len(period)] for i in range(count)]

    def _previous_end(self, end: int) -> int:
        """Where the run that ends here ended before; 0: nowhere."""
        return self._earlier_end[end - self._min_match] if end >= self._min_match else 0

    def _match_length(self, end: int) -> int:
        """How many tokens before `end` equal the sequence's last ones; the run is known to."""
        tokens, last = self._tokens, len(self._tokens)
        length, most = self._min_match, min(self._max_match, end)
        while length < most and tokens[end - length - 1] == tokens[last - length - 1]:
            length += 1
        return length

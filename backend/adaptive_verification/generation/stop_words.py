"""Pieces of text -> text that may be given out, ending before the first stop word.

Knows characters only. The rule does not depend on how the text is cut into pieces: the stop word that is complete
first wins; of several complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopWordFilter:
    """Withholds text that may be the start of a stop word until that is decided.

    One Knuth-Morris-Pratt automaton per stop word: constant work per character and word.
    """

    def __init__(self, stop_words: Sequence[str]) -> None:
        self._words = stop_words
        self._fallbacks = [_fallbacks(word) for word in stop_words]
        self._matched = [0] * len(stop_words)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be given out now. Sets `stopped` where a stop word is complete; give nothing after that."""
        if not self._words:
            return text
        held = self._held + text
        start = len(self._held)
        for position, character in enumerate(text, start + 1):
            longest_complete = 0
            for i, word in enumerate(self._words):
                matched = self._advance(i, character)
                if matched == len(word):
                    longest_complete = max(longest_complete, matched)
            if longest_complete:
                self.stopped = True
                self._held = ""
                return held[: position - longest_complete]
        decided = len(held) - max(self._matched)
        self._held = held[decided:]
        return held[:decided]

    def finish(self) -> str:
        """The text ends here: what was withheld is no stop word."""
        held, self._held = self._held, ""
        return held

    def _advance(self, i: int, character: str) -> int:
        word, fallback, matched = self._words[i], self._fallbacks[i], self._matched[i]
        while matched and word[matched] != character:
            matched = fallback[matched - 1]
        if word[matched] == character:
            matched += 1
        self._matched[i] = matched
        return matched


def _fallbacks(word: str) -> list[int]:
    """For each prefix of the word the length of its longest proper prefix that is also its suffix."""
    fallbacks = [0] * len(word)
    matched = 0
    for i in range(1, len(word)):
        while matched and word[matched] != word[i]:
            matched = fallbacks[matched - 1]
        matched += word[matched] == word[i]
        fallbacks[i] = matched
    return fallbacks

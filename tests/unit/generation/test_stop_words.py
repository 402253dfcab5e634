"""Stop words against a definition that looks at the whole text at once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from adaptive_verification.generation.stop_words import StopWordFilter

WORDS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text("abc", max_size=5), max_size=12)


def expected(text: str, words: list[str]) -> tuple[str, bool]:
    """The text before the stop word that is complete first; of several, the longest."""
    found = [(text.find(word) + len(word), -len(word)) for word in words if word in text]
    if not found:
        return text, False
    end, negative_length = min(found)
    return text[: end + negative_length], True


def run(pieces: list[str], words: list[str]) -> tuple[str, bool]:
    stop_words, text = StopWordFilter(words), ""
    for piece in pieces:
        text += stop_words.push(piece)
        if stop_words.stopped:
            return text, True
    return text + stop_words.finish(), False


@given(PIECES, WORDS)
@example(["ab", "c"], ["c", "bc"])
@example(["abc"], ["abcd", "b"])
def test_any_cut_into_pieces_gives_the_text_before_the_first_complete_stop_word(
    pieces: list[str], words: list[str]
) -> None:
    assert run(pieces, words) == expected("".join(pieces), words)


@given(PIECES, WORDS)
def test_no_more_than_the_possible_start_of_a_stop_word_is_withheld(pieces: list[str], words: list[str]) -> None:
    stop_words, given_out, text = StopWordFilter(words), "", ""
    for piece in pieces:
        given_out += stop_words.push(piece)
        text += piece
        if stop_words.stopped:
            return
        withheld = text.removeprefix(given_out)
        assert given_out + withheld == text
        starts = [word[:length] for word in words for length in range(1, len(word))]
        assert withheld == max((start for start in starts if text.endswith(start)), key=len, default="")


def test_a_stop_word_may_cross_pieces_and_characters_outside_the_basic_plane() -> None:
    assert run(["a 🧑", "\u200d", "🚀 b"], ["🧑\u200d🚀"]) == ("a ", True)

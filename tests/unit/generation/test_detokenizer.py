"""Incremental decoding against decoding everything at once, for each kind of decoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.generation.scripted import FIRST_BYTE_TOKEN, byte_tokens, make_byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from adaptive_verification.generation.detokenizer import Detokenizer

WORDS = ["▁Hello", "▁world", "▁", "a", "b", "漢", "lo", "\ufffd", "▁🧑"]
FIRST_FALLBACK_TOKEN = 3
NO_BYTE_TOKENS = [1, 2, *range(FIRST_FALLBACK_TOKEN + 256, FIRST_FALLBACK_TOKEN + 256 + len(WORDS))]


def make_sentencepiece_tokenizer(*, byte_fallback: bool) -> Tokenizer:
    """Metaspace words, Llama 2's decoder; the ids 1 and 2 are special, the bytes follow, then the words."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=byte_fallback))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if byte_fallback else [steps[0], *steps[2:]])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


CHARACTERS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"))

BYTE_LEVEL = make_byte_tokenizer()
METASPACE = make_sentencepiece_tokenizer(byte_fallback=False)
BYTE_FALLBACK = make_sentencepiece_tokenizer(byte_fallback=True)


def fallback_tokens(text: str) -> list[int]:
    return [FIRST_FALLBACK_TOKEN + byte for byte in text.encode()]


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(st.lists(st.integers(0, 257)))
def test_byte_level_pieces_join_to_decode_of_all_whatever_the_bytes(tokens: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)


@given(st.lists(st.sampled_from(NO_BYTE_TOKENS)))
def test_metaspace_pieces_join_to_decode_of_all(tokens: list[int]) -> None:
    assert "".join(pieces(METASPACE, tokens)) == METASPACE.decode(tokens)


@given(
    st.lists(st.one_of(st.sampled_from([[1], [2], *([i] for i in range(259, 268))]), st.text().map(fallback_tokens)))
)
def test_byte_fallback_pieces_of_whole_characters_join_to_decode_of_all(groups: list[list[int]]) -> None:
    tokens = [token for group in groups for token in group]
    assert "".join(pieces(BYTE_FALLBACK, tokens)) == BYTE_FALLBACK.decode(tokens)


@pytest.mark.parametrize("following", [[], [FIRST_FALLBACK_TOKEN + 256 + WORDS.index("a")]])
@given(text=CHARACTERS.filter(lambda text: " " not in text), num_invalid=st.integers(0, 3))
def test_byte_fallback_keeps_whole_characters_that_bytes_of_none_follow(
    following: list[int], text: str, num_invalid: int
) -> None:
    # Spaces have a word of their own in such vocabularies.
    invalid = [FIRST_FALLBACK_TOKEN + 0xFF] * num_invalid
    joined = "".join(pieces(BYTE_FALLBACK, [*fallback_tokens("x" + text), *invalid, *following]))
    assert joined == "x" + text + "\ufffd" * num_invalid + "a" * len(following)


@given(CHARACTERS)
def test_a_character_comes_out_whole_with_its_last_token(text: str) -> None:
    *got, rest = pieces(BYTE_LEVEL, byte_tokens(text))
    assert got == [piece for character in text for piece in ["", "", "", character][-len(character.encode()) :]]
    assert rest == ""


@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_incomplete_character_at_the_end_is_shown_as_decode_shows_it(length: int) -> None:
    tokens = byte_tokens("a🧑")[: 1 + length]
    assert pieces(BYTE_LEVEL, tokens) == ["a", *[""] * length, BYTE_LEVEL.decode(tokens[1:])]
    assert tokens[0] == FIRST_BYTE_TOKEN + ord("a")

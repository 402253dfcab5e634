"""One request's text: any cut into steps, any stop words, streamed or not, gives the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.generation.scripted import CollectingSink, byte_tokens, make_byte_tokenizer, make_request

from adaptive_verification.generation.detokenizer import Detokenizer
from adaptive_verification.generation.response import FinishReason
from adaptive_verification.generation.text_stream import SequenceUpdate, TextStream

TOKENIZER = make_byte_tokenizer()
ALPHABET = "aé漢🧑\u0301"


def run(tokens: list[int], step_sizes: list[int], stop_words: list[str], *, stream: bool) -> CollectingSink:
    sink = CollectingSink()
    text_stream = TextStream(make_request(stop_words=stop_words, stream=stream), Detokenizer(TOKENIZER), sink)
    start = 0
    for size in [*step_sizes, len(tokens)]:
        taken = tokens[start : start + size]
        start += len(taken)
        finish_reason = FinishReason.LENGTH if start == len(tokens) else None
        text_stream.take(SequenceUpdate(0, text_stream, taken, 3, 1, finish_reason))
        text_stream.send()
    return sink


@given(
    st.text(ALPHABET, max_size=20),
    st.integers(0, 3),
    st.lists(st.integers(1, 8), max_size=10),
    st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3),
)
def test_streamed_text_is_the_plain_text_is_the_full_text_cut_at_the_first_stop_word(
    text: str, num_cut_bytes: int, step_sizes: list[int], stop_words: list[str]
) -> None:
    tokens = byte_tokens(text)[: max(0, len(text.encode()) - num_cut_bytes)]
    full = TOKENIZER.decode(tokens)
    ends = [(full.find(word) + len(word), -len(word)) for word in stop_words if word in full]
    end, negative_length = min(ends, default=(len(full), 0))
    plain = run(tokens, step_sizes, stop_words, stream=False)
    streamed = run(tokens, step_sizes, stop_words, stream=True)
    assert plain.text == streamed.text == full[: end + negative_length]
    assert len(plain.responses) == 1
    num_tokens = len(full[:end].encode()) if ends else len(tokens)
    assert plain.num_output_tokens == streamed.num_output_tokens == num_tokens
    assert plain.last.finish_reason == streamed.last.finish_reason == ("stop" if ends else "length")
    assert plain.last[4:] == streamed.last[4:]
    assert all(response.text_output for response in streamed.responses[:-1])
    assert all(response.acceptance_rate is None for response in streamed.responses[:-1])

"""The codec over real transformers tokenizers, made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.generation.scripted import END_TOKEN, byte_tokens, make_byte_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from adaptive_verification.errors import InvalidRequest, UnsupportedModel
from adaptive_verification.generation.text_codec import TextCodec

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make_byte_tokenizer(), eos_token="<end>", chat_template=TEMPLATE)


def test_text_and_chat_are_encoded_and_decoded_back(tokenizer: PreTrainedTokenizerFast) -> None:
    codec = TextCodec(tokenizer)
    assert codec.encode_text("hé") == byte_tokens("hé")
    text = codec.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<user>hi<answer>"
    assert codec.encode_rendered_chat(text) == byte_tokens(text)
    detokenizer = codec.detokenizer()
    assert "".join(detokenizer.push(token) for token in byte_tokens(text)) == text


def test_messages_are_refused_without_a_template_or_by_it(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidRequest, match=r"messages.*no tools"):
        TextCodec(tokenizer).render_chat([{"role": "tool", "content": "x"}])
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(tokenizer).render_chat([{"role": "user", "content": "x"}])


def test_end_tokens_are_the_models_own_or_else_the_tokenizers(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    codec = TextCodec.from_pretrained(str(tmp_path))
    assert codec.end_token_ids(str(tmp_path)) == {END_TOKEN}
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert codec.end_token_ids(str(tmp_path)) == {5, 6}


def test_a_tokenizer_that_cannot_decode_incrementally_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(UnsupportedModel, match="SlowTokenizer"):
        TextCodec(SlowTokenizer())  # type: ignore[arg-type]

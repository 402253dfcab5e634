"""The target's tokenizer, as the text front uses it: prompts in, incremental text out.

Knows transformers' tokenizers and chat templates; nothing of requests, their limits or sampling.
"""

from __future__ import annotations

from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from adaptive_verification.errors import InvalidRequest, UnsupportedModel
from adaptive_verification.generation.detokenizer import Detokenizer


class TextCodec:
    """Encodes prompts and makes detokenizers; encoding is safe from several threads.

    Raises:
        UnsupportedModel: the tokenizer is not one of the `tokenizers` library, which decodes incrementally.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise UnsupportedModel(
                f"the tokenizer is {type(tokenizer).__name__}; it must be one of the `tokenizers` library (a model "
                "directory with a tokenizer.json)"
            )
        self._tokenizer: Any = tokenizer

    @classmethod
    def from_pretrained(cls, target: str) -> TextCodec:
        """The codec of a model directory or hub name."""
        return cls(AutoTokenizer.from_pretrained(target))

    def encode_text(self, text: str) -> list[int]:
        """Plain text as it is, with whatever the tokenizer itself puts around it (a begin-of-sequence token, say)."""
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        return tokens

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The messages in the model's chat template, ready for its answer.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
        """
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("messages is given, but the target has no chat template; it must be text_input")
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"messages is refused by the target's chat template: {error}") from None
        return text

    def encode_rendered_chat(self, text: str) -> list[int]:
        """A rendered template; it holds all special tokens already."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def detokenizer(self) -> Detokenizer:
        """A new one, for the output of one request."""
        return Detokenizer(self._tokenizer.backend_tokenizer)

    def end_token_ids(self, target: str) -> frozenset[int]:
        """The tokens that end a text: those of the model's generation configuration, or the tokenizer's."""
        try:
            configured = GenerationConfig.from_pretrained(target).eos_token_id
        except OSError:  # the model has no generation configuration
            configured = None
        if configured is None:
            configured = self._tokenizer.eos_token_id
        if configured is None:
            return frozenset()
        return frozenset([configured] if isinstance(configured, int) else configured)

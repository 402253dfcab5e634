"""Tokens of one output, one after another -> pieces of text that never split a character.

Built on the `tokenizers` library's own `DecodeStream`; knows nothing of requests or stop words.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Incremental decoding, special tokens left out.

    The pieces, `finish` included, join to `tokenizer.decode(all tokens)` exactly, with one exception: a tokenizer with
    byte fallback (Llama 2, Gemma) decodes a run of byte tokens as a whole, so bytes that are no character also spoil
    whole characters right before them. Those were given out already and stay.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held_tokens: list[int] = []
        self._context_tokens: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._held_tokens.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:
            self._stream = DecodeStream(skip_special_tokens=True)
            self._context_tokens = []
            for held in self._held_tokens:
                piece = self._stream.step(self._tokenizer, held)
        if not piece:
            return ""
        self._context_tokens, self._held_tokens = self._held_tokens, []
        return piece

    def finish(self) -> str:
        """What is still held: the bytes of an incomplete character, as `decode` shows them."""
        context = self._tokenizer.decode(self._context_tokens)
        whole = self._tokenizer.decode(self._context_tokens + self._held_tokens)
        if whole.startswith(context):
            return whole.removeprefix(context)
        return self._tokenizer.decode(self._held_tokens)

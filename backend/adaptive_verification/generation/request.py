"""Raw inputs of one request -> a validated `GenerationRequest`.

Knows the names and defaults of the text front's inputs; not Triton (raw inputs are plain Python values) and nothing of
how tokens are made.

Defaults that are a choice of ours
- `exclude_input_in_output` is true: `text_output` holds new text only, as users of LLM servers expect. False puts the
  prompt (for `messages`: the rendered template) before the first new text, once.
- No `seed`: a fresh random one for each request. No `max_tokens`, `num_draft_tokens` or `acceptance`: the server's
  settings.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from adaptive_verification.errors import InvalidRequest
from adaptive_verification.generation.sampling_parameters import SamplingParameters, validated
from adaptive_verification.settings import GenerateSettings


@dataclass(frozen=True)
class GenerationRequest:
    """A request that can be served."""

    prompt_tokens: list[int]
    sampling: SamplingParameters
    stream: bool = False
    echoed_text: str = ""
    """Comes before the first new text of the output."""


class ChatMessage(BaseModel):
    """One entry of `messages`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str


class FrontInputs(BaseModel):
    """The inputs that are not sampling parameters, as they arrive."""

    model_config = ConfigDict(extra="forbid")

    text_input: str = Field("", description="a string")
    stream: bool = Field(False, description="true or false")
    exclude_input_in_output: bool = Field(True, description="true or false")
    sampling_parameters: dict[str, Any] = Field(
        default_factory=dict, description=f"a JSON object with any of {', '.join(SamplingParameters.model_fields)}"
    )
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, description='a JSON list of at least one {"role": string, "content": string}'
    )


class Encoder(Protocol):
    """What the parser needs of a tokenizer (`text_codec.TextCodec`)."""

    def encode_text(self, text: str) -> list[int]: ...

    def render_chat(self, messages: list[dict[str, str]]) -> str: ...

    def encode_rendered_chat(self, text: str) -> list[int]: ...


INPUT_NAMES = (*FrontInputs.model_fields, *SamplingParameters.model_fields)
LIST_INPUTS = frozenset({"stop_words"})
JSON_INPUTS = frozenset({"sampling_parameters", "messages"})


class RequestParser:
    """Turns raw inputs into requests; safe to use from several threads."""

    def __init__(self, encoder: Encoder, settings: GenerateSettings) -> None:
        self._encoder = encoder
        self._settings = settings

    def parse(self, raw: Mapping[str, list[Any]]) -> GenerationRequest:
        """A request from the elements of each input tensor: bytes or strings, numbers, booleans.

        Raises:
            InvalidRequest: naming the field, its value and what is allowed.
        """
        values = {name: _plain_value(name, elements) for name, elements in raw.items()}
        direct = {name: values.pop(name) for name in SamplingParameters.model_fields if name in values}
        inputs: FrontInputs = validated(FrontInputs, values)
        twice = sorted(direct.keys() & inputs.sampling_parameters.keys())
        if twice:
            raise InvalidRequest(f"{twice[0]} is given twice: as an input and in sampling_parameters; give it once")
        sampling = self._sampling(inputs.sampling_parameters | direct)
        prompt_text, prompt_tokens = self._encode_prompt(inputs)
        return GenerationRequest(
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            stream=inputs.stream,
            echoed_text="" if inputs.exclude_input_in_output else prompt_text,
        )

    def _sampling(self, given: dict[str, Any]) -> SamplingParameters:
        defaults = {
            "max_tokens": self._settings.default_max_tokens,
            "num_draft_tokens": self._settings.num_draft_tokens,
            "seed": secrets.randbits(64),
            "acceptance": self._settings.acceptance,
        }
        sampling: SamplingParameters = validated(SamplingParameters, defaults | given)
        return sampling

    def _encode_prompt(self, inputs: FrontInputs) -> tuple[str, list[int]]:
        if inputs.messages is None:
            field_name, text = "text_input", inputs.text_input
            tokens = self._encoder.encode_text(text)
        elif inputs.text_input:
            raise InvalidRequest("text_input and messages are both given; give one of them")
        else:
            field_name = "messages"
            text = self._encoder.render_chat([message.model_dump() for message in inputs.messages])
            tokens = self._encoder.encode_rendered_chat(text)
        longest = self._settings.max_context_tokens - 1
        if not text or not tokens:
            raise InvalidRequest(f"{field_name} is empty; it must hold at least one token (or send messages)")
        if len(tokens) > longest:
            raise InvalidRequest(f"{field_name} has {len(tokens)} tokens; it must have at most {longest}")
        return text, tokens


def _plain_value(name: str, elements: list[Any]) -> Any:
    if name not in INPUT_NAMES:
        raise InvalidRequest(f"{name} is not a known input; known are {', '.join(INPUT_NAMES)}")
    decoded = [_decoded(name, element) for element in elements]
    if name in LIST_INPUTS:
        return decoded
    if len(decoded) != 1:
        raise InvalidRequest(f"{name} has {len(decoded)} elements; it must have exactly 1")
    if name not in JSON_INPUTS:
        return decoded[0]
    try:
        return json.loads(decoded[0])
    except ValueError as error:
        allowed = FrontInputs.model_fields[name].description
        raise InvalidRequest(f"{name} is not JSON ({error}); it must be {allowed}") from None


def _decoded(name: str, element: Any) -> Any:
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 (byte {error.start}); strings must be UTF-8") from None

"""Raw inputs to requests: defaults, both ways of giving a parameter, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.generation.scripted import byte_tokens

from adaptive_verification.errors import InvalidRequest
from adaptive_verification.generation.request import GenerationRequest, RequestParser
from adaptive_verification.settings import GenerateSettings


class ByteEncoder:
    """Byte tokens; a rendered chat is its messages in brackets."""

    def encode_text(self, text: str) -> list[int]:
        return byte_tokens(text)

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"[{message['role']}: {message['content']}]" for message in messages)

    def encode_rendered_chat(self, text: str) -> list[int]:
        return [0, *byte_tokens(text)]


SETTINGS = GenerateSettings.from_strings(
    {"max_context_tokens": "64", "default_max_tokens": "33", "num_draft_tokens": "5"}
)
PARSER = RequestParser(ByteEncoder(), SETTINGS)


def parse(**inputs: Any) -> GenerationRequest:
    """Each input as Triton delivers it: strings as bytes, everything in a list."""
    raw = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    encoded = {
        name: [value.encode() if isinstance(value, str) else value for value in values] for name, values in raw.items()
    }
    return PARSER.parse({"text_input": [b"prompt"]} | encoded)


def test_a_prompt_alone_gets_the_documented_defaults() -> None:
    request = parse()
    assert request.prompt_tokens == byte_tokens("prompt")
    assert (request.stream, request.echoed_text) == (False, "")
    sampling = request.sampling.model_dump(exclude={"seed"})
    assert sampling == {
        "max_tokens": 33,
        "num_draft_tokens": 5,
        "acceptance": "rejection",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop_words": (),
    }


def test_without_a_seed_every_request_gets_its_own() -> None:
    assert len({parse().sampling.seed for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 7),
        ("num_draft_tokens", 0),
        ("temperature", 0.5),
        ("top_p", 0.25),
        ("top_k", 40),
        ("seed", 2**64 - 1),
        ("acceptance", "coupled"),
        ("stop_words", ["\n\n", "Ende: ä"]),
    ],
)
def test_a_parameter_means_the_same_as_an_input_and_in_sampling_parameters(name: str, value: Any) -> None:
    direct = getattr(parse(**{name: value}).sampling, name)
    in_json = getattr(parse(sampling_parameters=json.dumps({name: value})).sampling, name)
    assert direct == in_json == (tuple(value) if isinstance(value, list) else value)
    if not isinstance(value, list):
        as_string = getattr(parse(sampling_parameters=json.dumps({name: str(value)})).sampling, name)
        assert as_string == value


def test_values_that_mean_off_or_greedy_are_unified() -> None:
    sampling = parse(top_k=-1, temperature=1e-6).sampling
    assert (sampling.top_k, sampling.temperature) == (0, 0.0)


def test_one_stop_word_in_sampling_parameters_may_stand_alone() -> None:
    assert parse(sampling_parameters='{"stop_words": "END"}').sampling.stop_words == ("END",)


def test_messages_go_through_the_chat_template() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for text_input in ("", None):
        inputs: dict[str, list[Any]] = {"messages": [json.dumps(messages).encode()], "exclude_input_in_output": [False]}
        if text_input is not None:
            inputs["text_input"] = [text_input.encode()]
        request = PARSER.parse(inputs)
        assert request.echoed_text == "[system: be brief][user: hi]"
        assert request.prompt_tokens == [0, *byte_tokens(request.echoed_text)]


def test_the_prompt_is_echoed_on_request() -> None:
    assert parse(exclude_input_in_output=False).echoed_text == "prompt"


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({"max_tokens": 0}, ["max_tokens", "0", "from 1"]),
        ({"max_tokens": [3, 4]}, ["max_tokens", "2 elements", "exactly 1"]),
        ({"temperature": -0.5}, ["temperature", "-0.5", "from 0 (greedy) to 100"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"top_p": 0.0}, ["top_p", "0.0", "above 0 and at most 1"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_k": -2}, ["top_k", "-2", "0 or -1 (off)"]),
        ({"acceptance": "greedy"}, ["acceptance", "'greedy'", "rejection or coupled"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens", "-1", "from 0"]),
        ({"stop_words": ["ok", ""]}, ["stop_words[1]", "''", "1 to 256 characters"]),
        ({"stop_words": ["x" * 257]}, ["stop_words[0]", "1 to 256 characters"]),
        ({"stop_words": ["x"] * 17}, ["stop_words", "at most 16"]),
        ({"stop_words": [b"\xff"]}, ["stop_words", "UTF-8"]),
        ({"text_input": b"\xff"}, ["text_input", "UTF-8"]),
        ({"text_input": ""}, ["text_input", "empty"]),
        ({"text_input": "x" * 64}, ["text_input", "64 tokens", "at most 63"]),
        ({"sampling_parameters": "{"}, ["sampling_parameters", "not JSON"]),
        ({"sampling_parameters": "[1]"}, ["sampling_parameters", "[1]", "JSON object"]),
        ({"sampling_parameters": '{"best_of": 2}'}, ["best_of", "not a known parameter", "max_tokens"]),
        ({"sampling_parameters": '{"max_tokens": "many"}'}, ["max_tokens", "'many'", "from 1"]),
        ({"sampling_parameters": '{"seed": 18446744073709551616}'}, ["seed", "0 to 18446744073709551615"]),
        ({"sampling_parameters": '{"top_k": 3}', "top_k": 3}, ["top_k", "twice"]),
        ({"messages": '[{"role": "user", "content": "x"}]'}, ["text_input and messages"]),
        ({"text_input": "", "messages": "[]"}, ["messages", "[]", "at least one"]),
        ({"text_input": "", "messages": '[{"role": "user"}]'}, ["messages[0]", '{"role": string, "content": string}']),
        ({"text_input": "", "messages": '[{"role": "user", "content": 1}]'}, ["messages[0]", "1"]),
        ({"text_input": "", "messages": json.dumps([{"role": "u", "content": "x" * 99}])}, ["messages", "at most 63"]),
        ({"beam_width": 2}, ["beam_width", "not a known input"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_what_is_allowed(inputs: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**inputs)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_several_wrong_values_are_all_named() -> None:
    with pytest.raises(InvalidRequest, match=r"max_tokens.*; top_p") as error:
        parse(max_tokens=0, top_p=2.0)
    assert "\n" not in str(error.value)


def test_a_wrong_value_is_shown_shortened() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(stop_words=["x" * 100_000])
    assert len(str(error.value)) < 300

"""Text in, text out, through a real server: what comes out is what the target alone would write."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from tests.integration.conftest import GenerateClient, wait_until
from tests.prompts import prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.serving.launcher import RunningServer

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("default"))


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve_model("default"), dtype=torch.float32).eval()


def greedy(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_tokens: int) -> list[int]:
    """transformers' own greedy continuation, as token ids."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    generate: Any = target.generate
    output = generate(ids, max_new_tokens=max_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
    new_tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return new_tokens


def test_greedy_text_is_transformers_own_on_twenty_prompts(
    client: GenerateClient, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = prompts(20, max_characters=300)
    answers = client.generate_all([{"text_input": text, "max_tokens": 24, "temperature": 0.0} for text in texts])
    for text, answer in zip(texts, answers, strict=True):
        expected = greedy(target, tokenizer, text, 24)
        assert answer.body["text_output"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.body["num_output_tokens"] == len(expected)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "num_draft_tokens": 0}])
def test_streamed_text_is_the_unstreamed_text(client: GenerateClient, settings: dict[str, Any]) -> None:
    request = {"text_input": "Write three emoji: 😀", "max_tokens": 40, **settings}
    whole = client.generate(**request).body
    pieces = client.stream(**request)
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"]
    assert sum(piece["num_output_tokens"] for piece in pieces) == whole["num_output_tokens"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    assert len(pieces) > 1


def test_sixty_four_concurrent_requests_each_equal_their_solo_run(client: GenerateClient) -> None:
    requests: list[dict[str, Any]] = [
        {"text_input": text, "max_tokens": 4 + i % 9, "temperature": 0.0, "num_draft_tokens": i % 4}
        for i, text in enumerate(prompts(64, max_characters=160))
    ]
    together = client.generate_all(requests)
    assert [answer.status for answer in together] == [200] * 64
    for request, answer in zip(requests, together, strict=True):
        alone = client.generate(**{**request, "num_draft_tokens": 0}).body
        assert (answer.body["text_output"], answer.body["finish_reason"]) == (
            alone["text_output"],
            alone["finish_reason"],
        )


def test_the_number_of_drafts_does_not_change_greedy_text(client: GenerateClient) -> None:
    texts = prompts(4, max_characters=160)
    answers = {
        drafts: client.generate_all(
            [{"text_input": t, "max_tokens": 24, "temperature": 0.0, "num_draft_tokens": drafts} for t in texts]
        )
        for drafts in (0, 7)
    }
    for without, with_drafts in zip(answers[0], answers[7], strict=True):
        assert without.body["text_output"] == with_drafts.body["text_output"]
        assert without.body["total_draft_tokens"] == 0


def test_what_repeats_is_looked_up_and_greedy_text_stays_the_targets_own(client: GenerateClient) -> None:
    request = {"text_input": "1. apple, pear, plum, cherry, grape, melon.\n" * 5, "max_tokens": 48, "temperature": 0.0}
    without = client.generate(**request, num_draft_tokens=0).body
    accepted = client.metric("av_estimator_looked_up_accepted_tokens_total")
    with_lookup = client.generate(**request, num_draft_tokens=7).body
    assert with_lookup["text_output"] == without["text_output"]
    assert with_lookup["total_accepted_draft_tokens"] > 20
    wait_until(lambda: client.metric("av_estimator_looked_up_accepted_tokens_total") > accepted + 20)


def test_a_conversations_next_turn_computes_only_what_is_new(
    client: GenerateClient, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    first_turn = "A list of things that one finds in a kitchen, in a garden and in a garage: "
    first = client.generate(text_input=first_turn, max_tokens=24, temperature=0.0).body["text_output"]
    reused = client.metric("av_reused_prompt_tokens_total")
    next_turn = f"{first_turn}{first} And which of them are made of wood?"
    answer = client.generate(text_input=next_turn, max_tokens=16, temperature=0.0).body
    expected = greedy(target, tokenizer, next_turn, 16)
    assert answer["text_output"] == tokenizer.decode(expected, skip_special_tokens=True)
    # the last token was never computed, and the one before may be another one where text follows
    shared = len(tokenizer(first_turn + first)["input_ids"]) - 2
    wait_until(lambda: client.metric("av_reused_prompt_tokens_total") >= reused + shared)


def test_a_long_prompt_does_not_stop_the_others(client: GenerateClient) -> None:
    """While a prompt of 1,800 tokens is computed in chunks, a short request starts and ends."""
    long = {"text_input": "word " * 1800, "max_tokens": 2, "temperature": 0.0}
    finished: queue.Queue[str] = queue.Queue()
    steps_before = client.metric("av_prompt_tokens_total")

    def run(name: str, request: dict[str, Any]) -> None:
        assert client.generate(**request).status == 200
        finished.put(name)

    threads = [threading.Thread(target=run, args=("long", long))]
    threads[0].start()
    wait_until(lambda: client.metric("av_live_sequences") > 0 or client.metric("av_prompt_tokens_total") > steps_before)
    threads.append(threading.Thread(target=run, args=("short", {"text_input": PROMPT, "max_tokens": 2})))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert finished.get() == "short"


def test_a_cancelled_stream_frees_its_sequence(client: GenerateClient, server: RunningServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    stream = triton.InferenceServerClient(server.grpc_url)
    stream.start_stream(callback=lambda result, error: answers.put((result, error)))
    inputs = []
    for name, value, triton_type, dtype in (
        ("text_input", PROMPT.encode(), "BYTES", np.object_),
        ("stream", True, "BOOL", np.bool_),
        ("max_tokens", 1500, "INT32", np.int32),
    ):
        tensor = triton.InferInput(name, [1, 1], triton_type)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        inputs.append(tensor)
    stream.async_stream_infer("generate", inputs)
    result, error = answers.get(timeout=60)
    assert error is None
    assert result is not None
    stream.stop_stream(cancel_requests=True)
    # the gauge is published twice a second; the long text would take minutes
    wait_until(lambda: client.metric("av_live_sequences") == 0)
    assert client.generate(text_input=PROMPT, max_tokens=2).status == 200


def test_stop_words_end_the_text_before_them(client: GenerateClient) -> None:
    full = client.generate(text_input=PROMPT, max_tokens=24, temperature=0.0).body["text_output"]
    stop = full[7:11]
    answer = client.generate(text_input=PROMPT, max_tokens=24, temperature=0.0, stop_words=[stop]).body
    assert answer["text_output"] == full[: full.index(stop)]
    assert answer["finish_reason"] == "stop"
    streamed = client.stream(text_input=PROMPT, max_tokens=24, temperature=0.0, stop_words=[stop])
    assert "".join(piece["text_output"] for piece in streamed) == answer["text_output"]


def test_a_chat_is_rendered_with_the_models_template(
    client: GenerateClient, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = client.generate(messages=json.dumps(messages), max_tokens=12, temperature=0.0).body
    expected = greedy(target, tokenizer, str(text), 12)
    assert answer["text_output"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_seed_repeats_its_text_and_sampling_parameters_are_understood(client: GenerateClient) -> None:
    parameters = {
        "temperature": "0.8",
        "top_p": 0.9,
        "top_k": 40,
        "seed": 11,
        "max_tokens": "12",
        "num_draft_tokens": 0,
    }
    request = {"text_input": PROMPT, "sampling_parameters": json.dumps(parameters)}
    first, second = client.generate(**request).body, client.generate(**request).body
    assert first["text_output"] == second["text_output"]
    assert 1 <= first["num_output_tokens"] <= 12


def test_the_prompt_can_be_included(client: GenerateClient) -> None:
    answer = client.generate(text_input=PROMPT, max_tokens=4, temperature=0.0, exclude_input_in_output=False).body
    assert answer["text_output"].startswith(PROMPT)


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({"max_tokens": 4}, "text_input"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": PROMPT, "max_tokens": 0}, "max_tokens"),
        ({"text_input": PROMPT, "temperature": -1.0}, "temperature"),
        ({"text_input": PROMPT, "top_p": 0.0}, "top_p"),
        ({"text_input": PROMPT, "top_k": -7}, "top_k"),
        ({"text_input": PROMPT, "num_draft_tokens": -1}, "num_draft_tokens"),
        ({"text_input": PROMPT, "sampling_parameters": "{"}, "sampling_parameters"),
        ({"text_input": PROMPT, "sampling_parameters": '{"beam_width": 3}'}, "beam_width"),
        ({"messages": "[1]"}, "messages"),
        ({"text_input": "word " * 3000}, "text_input"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    client: GenerateClient, request_fields: dict[str, Any], named: str
) -> None:
    answer = client.generate(**request_fields)
    assert answer.status == 400
    assert named in answer.body["error"]
    assert "Traceback" not in answer.body["error"]

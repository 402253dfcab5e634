"""The decode step as other clients drive it, beside the server's own front."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
import tritonclient.http as http
from tests.step_requests import RequestRow, step_request
from tritonclient.utils import InferenceServerException

from adaptive_verification.contract import (
    STATUS_BAD_TOKEN,
    STATUS_NOT_CACHED,
    STATUS_OK,
    Draft,
    Estimate,
    StepRequest,
    StepResult,
)
from adaptive_verification.contract.message import Message
from adaptive_verification.contract.wire import from_numpy, to_numpy
from adaptive_verification.serving.launcher import RunningServer

TOKENS = [504, 3575, 282, 4649, 314]  # "The capital of France is"


def wire_inputs(message: Message, triton: Any = grpc, reader: str | None = None) -> list[Any]:
    arrays = to_numpy(message)
    inputs = []
    for tensor in message.wire_tensors(reader):
        array = arrays[tensor.name]
        inputs.append(triton.InferInput(tensor.name, list(array.shape), tensor.wire_type))
        inputs[-1].set_data_from_numpy(array)
    return inputs


@pytest.fixture
def step(server: RunningServer) -> Any:
    client = grpc.InferenceServerClient(server.grpc_url)
    return lambda request: from_numpy(StepResult, client.infer("speculative_step", wire_inputs(request)).as_numpy)


def test_a_bad_row_does_not_disturb_its_neighbours(step: Any) -> None:
    rows = [
        RequestRow(101, 0, TOKENS, draft_limit=2, temperature=0.0, wants_log_probs=True),
        RequestRow(102, 3, TOKENS, temperature=0.0),  # nothing of it is cached
        RequestRow(103, 0, [5, 999_999], temperature=0.0),
        RequestRow(104, 0, TOKENS, draft_limit=-1),  # only fills the caches
    ]
    result = step(step_request(rows)).validate()
    assert result.status.tolist() == [STATUS_OK, STATUS_NOT_CACHED, STATUS_BAD_TOKEN, STATUS_OK]
    assert (result.output_count > 0).tolist() == [True, False, False, False]
    assert result.log_probs.le(0).all()
    step(step_request([], release=[101, 104]))


def test_a_lost_cache_is_told_and_refilled(step: Any) -> None:
    first = step(step_request([RequestRow(105, 0, TOKENS, temperature=0.0)]))
    step(step_request([], release=[105]))
    output = first.output_tokens.tolist()
    lost = step(step_request([RequestRow(105, 5, output, temperature=0.0)]))
    assert lost.status.tolist() == [STATUS_NOT_CACHED]
    refilled = step(step_request([RequestRow(105, 0, TOKENS, temperature=0.0)]))
    assert refilled.output_tokens.tolist() == output
    step(step_request([], release=[105]))


def test_a_repeated_step_gives_the_same_answer(step: Any) -> None:
    row = RequestRow(106, 0, TOKENS, draft_limit=3, temperature=1.0, seed=5)
    first, again = step(step_request([row])), step(step_request([row]))
    assert first.output_tokens.tolist() == again.output_tokens.tolist()
    step(step_request([], release=[106]))


def test_a_step_over_http_is_the_same_step_with_rows_and_without(server: RunningServer, step: Any) -> None:
    client = http.InferenceServerClient(server.http_url.removeprefix("http://"))
    request = step_request([RequestRow(108, 0, TOKENS, draft_limit=2, temperature=1.0, seed=3)])

    def step_over_http(request: StepRequest) -> StepResult:
        return from_numpy(StepResult, client.infer("speculative_step", wire_inputs(request, http)).as_numpy).validate()

    assert step_over_http(request).output_tokens.tolist() == step(request).output_tokens.tolist()
    assert step_over_http(step_request([], release=[108])).num_rows == 0
    client.close()


def test_requests_of_several_clients_share_steps_and_stay_apart(server: RunningServer) -> None:
    def run(i: int) -> list[int]:
        client = grpc.InferenceServerClient(server.grpc_url)
        row = RequestRow(200 + i, 0, TOKENS[: 2 + i % 4], draft_limit=i % 3, temperature=0.0)
        response = client.infer("speculative_step", wire_inputs(step_request([row])))
        return from_numpy(StepResult, response.as_numpy).output_tokens.tolist()[:1]

    with ThreadPoolExecutor(12) as pool:
        first_tokens = list(pool.map(run, range(12)))
    for i in range(12):
        assert first_tokens[i] == first_tokens[i % 4], "the same prompt gives the same greedy token in any company"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("TOKENS", [1, 0], "TOKENS has 0 entries"),
        ("TEMPERATURE_AND_TOP_P", [1, 2, 0], r"TEMPERATURE \(line 0 of TEMPERATURE_AND_TOP_P\) has 0 entries"),
        ("TEMPERATURE_AND_TOP_P", [1, 1, 1], r"unexpected shape for input 'TEMPERATURE_AND_TOP_P'.*\[-1,2,-1\]"),
    ],
)
def test_a_malformed_request_is_told_which_tensor_is_wrong(
    server: RunningServer, name: str, shape: list[int], message: str
) -> None:
    client = grpc.InferenceServerClient(server.grpc_url)
    inputs = wire_inputs(step_request([RequestRow(107, 0, TOKENS)]))
    for tensor in inputs:
        if tensor.name() == name:
            tensor.set_shape(shape)
            tensor.set_data_from_numpy(np.ones(shape, np.int32 if name == "TOKENS" else np.float32))
    with pytest.raises(InferenceServerException, match=message):
        client.infer("speculative_step", inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafted_count": [3]}, "has 2 entries; it must have 3"),
        ({"draft_tokens": [-1, 504]}, r"DRAFT_TOKENS\[0\] is -1"),
        ({"draft_tokens": [504, 999_999]}, "DRAFT_TOKENS has 999999"),
        ({"candidate_count": [-1, 3]}, r"CANDIDATE_COUNT\[0\] is -1"),
        ({"candidate_ids": [504, 999_999]}, "CANDIDATE_IDS has 999999"),
        ({"candidate_probs": [1.0, float("nan")]}, r"CANDIDATE_PROBS\[1\] is nan"),
    ],
)
def test_a_verifier_that_is_called_by_itself_refuses_drafts_that_make_no_sense(
    server: RunningServer, step: Any, changes: dict[str, list[Any]], message: str
) -> None:
    client = grpc.InferenceServerClient(server.grpc_url)
    two = torch.full((2,), 504, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    draft = Draft(
        drafted_count=2 * one,
        draft_status=0 * one,
        draft_match_length=0 * one,
        draft_tokens=two,
        draft_log_odds=torch.zeros(2),
        draft_features=torch.zeros(0),
        candidate_count=torch.ones(2, dtype=torch.int32),
        candidate_ids=two,
        candidate_probs=torch.ones(2),
        draft_cost=torch.zeros(0),
    )
    estimate = Estimate(admitted_count=2 * one, next_draft_limit=0 * one, estimate_cost=torch.zeros(0))
    request = step_request([RequestRow(109, 0, TOKENS, draft_limit=2, temperature=1.0, seed=3)])

    def verify(draft: Draft) -> Any:
        inputs = [
            wire_input for part in (request, draft, estimate) for wire_input in wire_inputs(part, reader="verifier")
        ]
        return client.infer("verifier", inputs)

    broken = {name: torch.tensor(values, dtype=getattr(draft, name).dtype) for name, values in changes.items()}
    with pytest.raises(InferenceServerException, match=message):
        verify(dataclasses.replace(draft, **broken))
    result = from_numpy(StepResult, verify(draft).as_numpy).validate()
    assert result.admitted_count.tolist() == [2]
    step(step_request([], release=[109]))

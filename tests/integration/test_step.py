"""The decode step as other clients drive it, beside the server's own front."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tests.step_requests import RequestRow, step_request
from tritonclient.utils import InferenceServerException

from adaptive_verification.contract import STATUS_BAD_TOKEN, STATUS_NOT_CACHED, STATUS_OK, StepRequest, StepResult
from adaptive_verification.contract.wire import from_numpy, to_numpy
from adaptive_verification.serving.launcher import RunningServer

TOKENS = [504, 3575, 282, 4649, 314]  # "The capital of France is"


def wire_inputs(request: StepRequest, triton: Any = grpc) -> list[Any]:
    arrays = to_numpy(request)
    inputs = []
    for tensor in request.wire_tensors():
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

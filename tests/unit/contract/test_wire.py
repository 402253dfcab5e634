"""Messages as wire tensors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.step_requests import RequestRow, step_request
from tests.unit.contract.drafts import draft

from adaptive_verification.contract import DRAFTER, ESTIMATOR, VERIFIER, StepRequest, StepResult
from adaptive_verification.contract.message import Message
from adaptive_verification.contract.wire import from_numpy, from_triton, to_numpy, to_triton
from adaptive_verification.errors import ContractError


def request() -> StepRequest:
    rows = [RequestRow(2**63 - 1, 3, [1, 2], seed=-1, top_p=0.5), RequestRow(-5, 0, [7], draft_limit=4)]
    return step_request(rows, evidence_key=[-1])


class PbTensor:
    """The part of `pb_utils.Tensor` that is used here; an array, or memory that is handed over as it is."""

    def __init__(self, name: str, array: np.ndarray | None, memory: Any = None) -> None:
        self._name, self._array, self._memory = name, array, memory

    @classmethod
    def from_dlpack(cls, name: str, memory: Any) -> PbTensor:
        return cls(name, None, memory)

    def name(self) -> str:
        return self._name

    def is_cpu(self) -> bool:
        return self._array is not None

    def as_numpy(self) -> np.ndarray:
        assert self._array is not None
        return self._array

    def to_dlpack(self) -> Any:
        return self._memory.__dlpack__()


PB_UTILS = SimpleNamespace(Tensor=PbTensor)


def assert_equal(one: Message, other: Message) -> None:
    for name in (field.name for field in dataclasses.fields(one)):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


MESSAGES = [request(), step_request([], release=[3]), draft()]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_survives_the_wire(message: Message) -> None:
    fields = [field.name for field in dataclasses.fields(message)]
    on_host = dataclasses.replace(message, **{name: getattr(message, name).cpu() for name in fields})
    assert_equal(from_numpy(type(message), to_numpy(message).get), on_host)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_survives_triton_where_it_lies(message: Message) -> None:
    tensors = {tensor.name(): tensor for tensor in to_triton(message, PB_UTILS)}
    assert_equal(from_triton(type(message), tensors.get), message)


def test_fields_of_one_type_and_length_are_the_lines_of_one_tensor() -> None:
    """Clients in other languages count on this order."""
    lines = {
        tensor.name: tensor.fields
        for kind in (StepRequest, StepResult)
        for tensor in kind.wire_tensors()
        if len(tensor.fields) > 1
    }
    assert lines == {
        "IDS_AND_SEEDS": ("sequence_id", "seed"),
        "REQUEST_ROWS": (
            "context_length",
            "token_count",
            "draft_limit",
            "model_draft_limit",
            "top_k",
            "acceptance",
            "wants_log_probs",
            "previous_accepted",
            "previous_hidden_start",
            "previous_hidden_count",
        ),
        "TEMPERATURE_AND_TOP_P": ("temperature", "top_p"),
        "RESULT_ROWS": (
            "output_count",
            "status",
            "drafted_count",
            "admitted_count",
            "next_draft_limit",
            "hidden_start",
            "hidden_count",
        ),
    }


def test_lines_lie_in_their_order_and_numbers_of_64_bits_are_unsigned() -> None:
    arrays = to_numpy(request())
    assert arrays["IDS_AND_SEEDS"].dtype == np.uint64
    assert arrays["IDS_AND_SEEDS"].tolist() == [[[2**63 - 1, 2**64 - 5], [2**64 - 1, 0]]]
    assert arrays["REQUEST_ROWS"][0, :4].tolist() == [[3, 0], [2, 1], [0, 4], [16, 16]]
    assert arrays["TEMPERATURE_AND_TOP_P"].tolist() == [[[1.0, 1.0], [0.5, 1.0]]]
    assert arrays["EVIDENCE_KEY"].tolist() == [[2**64 - 1]]
    assert arrays["RELEASE"].shape == (1, 0)


def test_without_rows_the_lines_are_there_and_empty() -> None:
    arrays = to_numpy(step_request([], release=[3]))
    assert arrays["IDS_AND_SEEDS"].shape == (1, 2, 0)
    assert arrays["REQUEST_ROWS"].shape == (1, 10, 0)


def test_an_empty_array_may_be_of_any_type() -> None:
    """Triton's HTTP client gives all of them as float64."""
    arrays = to_numpy(step_request([], release=[3]))
    assert_equal(
        from_numpy(StepRequest, lambda name: arrays[name] if arrays[name].size else arrays[name].astype(np.float64)),
        step_request([], release=[3]),
    )


def test_received_fields_share_the_arrays_memory() -> None:
    arrays = to_numpy(request())
    received = from_numpy(StepRequest, arrays.get)
    arrays["REQUEST_ROWS"][0, 1] = [8, 9]
    assert received.token_count.tolist() == [8, 9]


def test_what_is_received_may_be_written_to() -> None:
    arrays = to_numpy(request())
    for array in arrays.values():
        array.flags.writeable = False  # as gRPC's are
    from_numpy(StepRequest, arrays.get).token_count[0] = 8
    assert arrays["REQUEST_ROWS"][0, 1].tolist() == [2, 1]


@pytest.mark.parametrize("reader", [DRAFTER, ESTIMATOR, VERIFIER])
def test_a_stage_is_sent_what_it_reads_and_the_rest_is_empty(reader: str) -> None:
    arrays = to_numpy(request())
    asked: list[str] = []

    def get_array(name: str) -> np.ndarray:
        asked.append(name)
        return arrays[name]

    received = from_numpy(StepRequest, get_array, reader).validate(reader)
    assert asked == [tensor.name for tensor in StepRequest.wire_tensors(reader)]
    assert received.tokens.tolist() == ([] if reader == ESTIMATOR else [1, 2, 7])
    assert received.evidence_key.tolist() == ([-1] if reader == ESTIMATOR else [])
    assert received.context_length.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("RELEASE", None, "RELEASE is missing; send an empty tensor"),
        ("IDS_AND_SEEDS", None, "IDS_AND_SEEDS is missing; send an empty tensor"),
        ("TOKENS", np.zeros((1, 1), np.int64), r"TOKENS is \[1, 1\] int64; it must be \[1, n\] INT32"),
        ("TOKENS", np.zeros(1, np.int32), r"TOKENS is \[1\] int32"),
        ("TOKENS", np.zeros((2, 1), np.int32), r"TOKENS is \[2, 1\] int32"),
        ("TOKENS", np.zeros((1, 1, 1), np.int32), r"TOKENS is \[1, 1, 1\] int32"),
        ("REQUEST_ROWS", np.zeros((1, 8, 1), np.int32), r"REQUEST_ROWS is \[1, 8, 1\] int32; it must be \[1, 10, n\]"),
        (
            "REQUEST_ROWS",
            np.zeros((1, 10), np.int32),
            r"REQUEST_ROWS is \[1, 10\] int32; .* \[1, 10, n\] INT32",
        ),
        ("IDS_AND_SEEDS", np.zeros((1, 2, 1), np.int64), r"IDS_AND_SEEDS is \[1, 2, 1\] int64; .* \[1, 2, n\] UINT64"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, array: np.ndarray | None, message: str) -> None:
    arrays = {**to_numpy(step_request([RequestRow(1, 0, [1])])), name: array}
    with pytest.raises(ContractError, match=message):
        from_numpy(StepRequest, arrays.get)


@pytest.mark.parametrize(
    ("tensor", "line", "value", "message"),
    [
        ("REQUEST_ROWS", 2, -2, r"DRAFT_LIMIT\[1\] is -2; it must be at least -1"),
        ("TEMPERATURE_AND_TOP_P", 1, np.nan, r"TOP_P\[1\] is nan; it must be above 0 and at most 1"),
        ("TOKENS", None, -3, r"TOKENS\[1\] is -3; it must be a token id of the target"),
    ],
)
def test_a_wrong_value_is_named_where_it_is_received(tensor: str, line: int | None, value: float, message: str) -> None:
    arrays = to_numpy(step_request([RequestRow(1, 0, [1]), RequestRow(2, 0, [1])]))
    (arrays[tensor][0] if line is None else arrays[tensor][0, line])[1] = value
    with pytest.raises(ContractError, match=message):
        from_numpy(StepRequest, arrays.get)

"""Messages as wire tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.step_requests import RequestRow, step_request

from adaptive_verification.contract import StepRequest
from adaptive_verification.contract.wire import from_numpy, to_numpy
from adaptive_verification.errors import ContractError


def test_a_message_survives_the_wire() -> None:
    request = step_request([RequestRow(2**63 - 1, 3, [1, 2], seed=-1), RequestRow(-5, 0, [7])], evidence_key=[-1])
    arrays = to_numpy(request)
    assert arrays["SEQUENCE_ID"].dtype == np.uint64
    assert arrays["SEQUENCE_ID"].tolist() == [[2**63 - 1, 2**64 - 5]]
    assert arrays["RELEASE"].shape == (1, 0)
    back = from_numpy(StepRequest, arrays.get)
    for field in request.specs():
        assert torch.equal(getattr(back, field), getattr(request, field)), field


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("SEED", None, "SEED is missing; send an empty tensor"),
        ("TOP_K", np.zeros((1, 1), np.int64), r"TOP_K is \[1, 1\] int64; it must be \[1, n\] INT32"),
        ("TOKENS", np.zeros(1, np.int32), r"TOKENS is \[1\] int32"),
        ("TOKENS", np.zeros((2, 1), np.int32), r"TOKENS is \[2, 1\] int32"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, array: np.ndarray | None, message: str) -> None:
    arrays = {**to_numpy(step_request([RequestRow(1, 0, [1])])), name: array}
    with pytest.raises(ContractError, match=message):
        from_numpy(StepRequest, arrays.get)

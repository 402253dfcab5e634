"""One Triton request's way in and out: its tensors as plain values, its response sender as a `Sink`."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from adaptive_verification.errors import AdaptiveVerificationError, InvalidRequest, ServerBusy
from adaptive_verification.generation.request import INPUT_NAMES
from adaptive_verification.generation.response import GenerationResponse

OUTPUT_TYPES: dict[str, Any] = {
    "text_output": np.object_,
    "finish_reason": np.object_,
    "num_input_tokens": np.int32,
    "num_output_tokens": np.int32,
    "acceptance_rate": np.float32,
    "total_draft_tokens": np.int32,
    "total_accepted_draft_tokens": np.int32,
}


def raw_inputs(request: Any) -> dict[str, list[Any]]:
    """Input name -> its elements, of the inputs that the client sent."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in INPUT_NAMES}
    return {name: tensor.as_numpy().ravel().tolist() for name, tensor in tensors.items() if tensor is not None}


class TritonSink:
    """Sends what the client asked for. The last response always carries the final flag."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._output_names = request.requested_output_names() or list(OUTPUT_TYPES)

    def send(self, response: GenerationResponse, *, final: bool) -> None:
        tensors = []
        for name in self._output_names:
            value = getattr(response, name)
            if value is None:
                continue
            if isinstance(value, str):
                value = value.encode()
            tensors.append(pb_utils.Tensor(name, np.array([[value]], dtype=OUTPUT_TYPES[name])))
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def fail(self, error: AdaptiveVerificationError) -> None:
        triton_error = pb_utils.TritonError(str(error), _code(error))
        self._send(pb_utils.InferenceResponse(error=triton_error), final=True)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def _code(error: AdaptiveVerificationError) -> Any:
    if isinstance(error, InvalidRequest):
        return pb_utils.TritonError.INVALID_ARG
    if isinstance(error, ServerBusy):
        return pb_utils.TritonError.UNAVAILABLE
    return pb_utils.TritonError.INTERNAL

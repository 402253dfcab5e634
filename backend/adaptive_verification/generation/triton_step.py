"""The decode step as Triton's ensemble runs it: one call to another model of the same server (BLS)."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from adaptive_verification.contract.messages import StepRequest, StepResult
from adaptive_verification.contract.wire import from_triton, to_triton
from adaptive_verification.errors import StepFailed

OUTPUT_NAMES = [tensor.name for tensor in StepResult.wire_tensors()]


class TritonStep:
    """A `contract.step.Step`; may be called from any one thread of the model's process."""

    def __init__(self, model_name: str = "speculative_step") -> None:
        self._model_name = model_name

    def __call__(self, request: StepRequest) -> StepResult:
        response = pb_utils.InferenceRequest(
            model_name=self._model_name,
            inputs=to_triton(request, pb_utils),
            requested_output_names=OUTPUT_NAMES,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise StepFailed(response.error().message())
        result: StepResult = from_triton(StepResult, lambda name: pb_utils.get_output_tensor_by_name(response, name))
        return result

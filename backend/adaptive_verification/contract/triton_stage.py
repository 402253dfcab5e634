"""Runs a stage on the requests that Triton hands to a Python model: parse, merge, run, split, answer.

Every request is answered, and answered on its own: one that is malformed gets its error while the others run, and
where a merged run fails the requests are run one by one, so that only the one at fault fails.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

from adaptive_verification.contract.message import Message
from adaptive_verification.contract.messages import StepRequest
from adaptive_verification.contract.wire import from_triton, to_triton
from adaptive_verification.errors import AdaptiveVerificationError, ContractError

Inputs = tuple[Any, ...]
"""A StepRequest, then the messages of the stages before."""


class TritonStage:
    """Adapts one stage.

    Args:
        pb_utils: the module `triton_python_backend_utils`, which exists only inside the server.
        name: the stage's, as in `contract.messages`: which tensors it is sent.
        input_types: `StepRequest` and then the messages of the stages before.
        run: the stage's `step`.
        prepare: what is done to each caller's own request before it is merged with others.
    """

    def __init__(
        self,
        pb_utils: Any,
        name: str,
        input_types: Sequence[type[Message]],
        run: Callable[..., Message],
        prepare: Callable[[StepRequest], StepRequest] = lambda request: request,
    ) -> None:
        self._pb_utils = pb_utils
        self._name = name
        self._input_types = tuple(input_types)
        self._run = run
        self._prepare = prepare
        gc.freeze()  # the loaded model and its libraries stay: no collection needs to look through them in mid-step

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """`pb_utils.InferenceRequest`s in, one `pb_utils.InferenceResponse` each out, in the same order."""
        responses: list[Any] = [None] * len(requests)
        parsed: dict[int, Inputs] = {}
        for i, request in enumerate(requests):
            try:
                parsed[i] = self._parse(request)
            except AdaptiveVerificationError as error:
                responses[i] = self._error(str(error), self._pb_utils.TritonError.INVALID_ARG)
        for group in _without_shared_sequences(parsed):
            for i, response in self._run_group({i: parsed[i] for i in group}).items():
                responses[i] = response
        return responses

    def _parse(self, triton_request: Any) -> Inputs:
        tensors = {tensor.name(): tensor for tensor in triton_request.inputs()}
        # stages can be called by themselves too, and compiled code checks nothing
        messages = [from_triton(kind, tensors.get, self._name) for kind in self._input_types]
        for message in messages:
            message.check_lengths(self._name)
        request, *others = messages
        num_rows = request.num_rows
        for message in others:
            if message.num_rows != num_rows:
                raise ContractError(
                    f"{type(message).__name__} has {message.num_rows} rows; it must have SEQUENCE_ID's {num_rows}"
                )
        return (self._prepare(cast(StepRequest, request)), *others)

    def _run_group(self, group: dict[int, Inputs]) -> dict[int, Any]:
        merged = [
            kind.concatenate([inputs[position] for inputs in group.values()])
            for position, kind in enumerate(self._input_types)
        ]
        try:
            result = self._run(*merged)
        except Exception as error:  # whatever a stage raises must reach the caller, not end the server's process
            if len(group) > 1:
                return {i: self._run_group({i: inputs})[i] for i, inputs in group.items()}
            if isinstance(error, ContractError):  # the caller's fault, seen only by the stage
                return {i: self._error(str(error), self._pb_utils.TritonError.INVALID_ARG) for i in group}
            self._pb_utils.Logger.log_error(f"a step failed:\n{traceback.format_exc()}")
            message = f"the step failed: {type(error).__name__}: {error}"
            return {i: self._error(message, self._pb_utils.TritonError.INTERNAL) for i in group}
        parts = result.split([inputs[0].num_rows for inputs in group.values()])
        return {
            i: self._pb_utils.InferenceResponse(output_tensors=to_triton(part, self._pb_utils))
            for i, part in zip(group, parts, strict=True)
        }

    def _error(self, message: str, code: int) -> Any:
        return self._pb_utils.InferenceResponse(error=self._pb_utils.TritonError(message, code))


def _without_shared_sequences(parsed: dict[int, Inputs]) -> list[list[int]]:
    """Groups of requests in which no sequence occurs twice, in the order of arrival."""
    groups: list[list[int]] = []
    seen: set[int] = set()
    for i, inputs in parsed.items():
        request: StepRequest = inputs[0]
        sequence_ids = set(request.sequence_id.tolist())
        if not groups or seen & sequence_ids:
            groups.append([])
            seen = set()
        groups[-1].append(i)
        seen |= sequence_ids
    return groups

"""Messages to and from Triton tensors, in every place where there are any: Python models, gRPC and HTTP clients.

Which tensor a message's field is, or is a line of, `contract.messages` says. Data stays where it is: CPU tensors share
numpy's memory, GPU tensors are handed over by DLPack. Only lines are put together when they are sent; received, a field
is a view of its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from adaptive_verification.contract.message import Message, WireTensor
from adaptive_verification.errors import ContractError

M = TypeVar("M", bound=Message)

_NUMPY_TYPES = {
    "INT32": np.dtype(np.int32),
    "FP32": np.dtype(np.float32),
    "UINT64": np.dtype(np.uint64),
    "UINT8": np.dtype(np.uint8),
}


def to_numpy(message: Message) -> dict[str, np.ndarray]:
    """Tensor name -> array of the wire's type and shape."""
    return {tensor.name: _values(message, tensor).cpu().numpy()[np.newaxis] for tensor in message.wire_tensors()}


def from_numpy(message_type: type[M], get_array: Callable[[str], np.ndarray | None], reader: str | None = None) -> M:
    """The inverse of `to_numpy`; `get_array` returns None for a tensor that is not there.

    Args:
        reader: the stage whose copy this is; what it does not read is empty.

    Raises:
        ContractError: a tensor is missing, or has the wrong type or shape, or a value that is not allowed. What is
            left to be checked is whether lengths fit, see `Message.check_lengths`; and values on a GPU, which nobody
            waits for.
    """
    return _from_wire(message_type, lambda tensor: _from_array(tensor, get_array(tensor.name)), reader)


def to_triton(message: Message, pb_utils: Any) -> list[Any]:
    """The message as `pb_utils.Tensor`s."""
    tensors = []
    for tensor in message.wire_tensors():
        values = _values(message, tensor)
        if values.is_cuda:
            tensors.append(pb_utils.Tensor.from_dlpack(tensor.name, values[None]))
        else:
            tensors.append(pb_utils.Tensor(tensor.name, values.numpy()[np.newaxis]))
    return tensors


def from_triton(message_type: type[M], get_tensor: Callable[[str], Any], reader: str | None = None) -> M:
    """A message from `pb_utils.Tensor`s, otherwise as `from_numpy`.

    Raises:
        ContractError: as `from_numpy`.
    """

    def get_values(tensor: WireTensor) -> Tensor:
        sent = get_tensor(tensor.name)
        if sent is not None and not sent.is_cpu():
            values = torch.utils.dlpack.from_dlpack(sent.to_dlpack())[0]
            return values.view(tensor.dtype) if tensor.wire_type == "UINT64" else values
        return _from_array(tensor, None if sent is None else sent.as_numpy())

    return _from_wire(message_type, get_values, reader)


def _values(message: Message, tensor: WireTensor) -> Tensor:
    """In the wire's type, and its shape but for the first 1."""
    lines = message.lines(tensor)
    return lines.view(torch.uint64) if tensor.wire_type == "UINT64" else lines


def _from_wire(message_type: type[M], get_values: Callable[[WireTensor], Tensor], reader: str | None) -> M:
    fields: dict[str, Tensor] = {}
    for tensor in message_type.wire_tensors():
        if not tensor.is_read_by(reader):
            fields.update(dict.fromkeys(tensor.fields, tensor.nothing))
            continue
        values = get_values(tensor)  # [lines, length], or [length] of one field
        lines = values.unbind() if len(tensor.fields) > 1 else (values,)
        fields.update(zip(tensor.fields, lines, strict=True))
    return message_type(**fields)


def _from_array(tensor: WireTensor, array: np.ndarray | None) -> Tensor:
    """A torch tensor over the array's memory, without the wire's first 1; 64-bit unsigned bits as int64. Checks the
    values here, where all lines are one array still."""
    if array is None:
        raise ContractError(f"{tensor.name} is missing; send an empty tensor where there is nothing to say")
    is_type = array.dtype == _NUMPY_TYPES[tensor.wire_type] or not array.size  # over HTTP, empty answers are float64
    if not is_type or array.shape[:-1] != tensor.shape:
        must_be = f"[{', '.join(map(str, tensor.shape))}, n] {tensor.wire_type}"
        raise ContractError(f"{tensor.name} is {list(array.shape)} {array.dtype}; it must be {must_be}")
    if not array.size:
        return torch.empty(array.shape[1:], dtype=tensor.dtype)
    if tensor.wire_type == "UINT64":
        array = array.view(np.int64)
    if tensor.ranges:
        tensor.check_ranges(array[0])
    return torch.from_numpy(array[0] if array.flags.writeable else array[0].copy())

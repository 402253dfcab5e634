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
    return {tensor.name: _to_wire(message, tensor).cpu().numpy() for tensor in message.wire_tensors()}


def from_numpy(message_type: type[M], get_array: Callable[[str], np.ndarray | None], reader: str | None = None) -> M:
    """The inverse of `to_numpy`; `get_array` returns None for a tensor that is not there.

    Args:
        reader: the stage whose copy this is; what it does not read is empty.

    Raises:
        ContractError: a tensor is missing, or has the wrong type or shape.
    """
    return _from_wire(message_type, lambda tensor: _from_array(tensor, get_array(tensor.name)), reader)


def to_triton(message: Message, pb_utils: Any) -> list[Any]:
    """The message as `pb_utils.Tensor`s."""
    tensors = []
    for tensor in message.wire_tensors():
        values = _to_wire(message, tensor)
        if values.is_cuda:
            tensors.append(pb_utils.Tensor.from_dlpack(tensor.name, values))
        else:
            tensors.append(pb_utils.Tensor(tensor.name, values.numpy()))
    return tensors


def from_triton(message_type: type[M], get_tensor: Callable[[str], Any], reader: str | None = None) -> M:
    """A message from `pb_utils.Tensor`s, otherwise as `from_numpy`.

    Raises:
        ContractError: as `from_numpy`.
    """

    def get_values(tensor: WireTensor) -> Tensor:
        sent = get_tensor(tensor.name)
        if sent is not None and not sent.is_cpu():
            return torch.utils.dlpack.from_dlpack(sent.to_dlpack())
        return _from_array(tensor, None if sent is None else sent.as_numpy())

    return _from_wire(message_type, get_values, reader)


def _to_wire(message: Message, tensor: WireTensor) -> Tensor:
    """The tensor in the wire's type and shape."""
    lines = message.lines(tensor)
    if tensor.wire_type == "UINT64":
        lines = lines.view(torch.uint64)
    return lines if len(tensor.fields) == 1 else lines[None]


def _from_wire(message_type: type[M], get_values: Callable[[WireTensor], Tensor], reader: str | None) -> M:
    fields: dict[str, Tensor] = {}
    for tensor in message_type.wire_tensors():
        if not tensor.is_read_by(reader):
            fields.update(dict.fromkeys(tensor.fields, torch.empty(0, dtype=tensor.dtype)))
            continue
        values = get_values(tensor)
        if tensor.wire_type == "UINT64":
            values = values.view(tensor.dtype)
        lines = values if len(tensor.fields) == 1 else values[0]  # [lines, length]
        fields.update(zip(tensor.fields, lines.unbind(), strict=True))
    return message_type(**fields)


def _from_array(tensor: WireTensor, array: np.ndarray | None) -> Tensor:
    """A torch tensor over the array's memory."""
    if array is None:
        raise ContractError(f"{tensor.name} is missing; send an empty tensor where there is nothing to say")
    is_type = array.dtype == _NUMPY_TYPES[tensor.wire_type] or not array.size  # over HTTP, empty answers are float64
    if not is_type or array.shape[:-1] != tensor.shape:
        must_be = f"[{', '.join(map(str, tensor.shape))}, n] {tensor.wire_type}"
        raise ContractError(f"{tensor.name} is {list(array.shape)} {array.dtype}; it must be {must_be}")
    if not array.size:
        return torch.empty(array.shape, dtype=tensor.dtype)
    return torch.from_numpy(array if array.flags.writeable else array.copy())

"""Messages to and from Triton tensors, in every place where there are any: Python models, gRPC and HTTP clients.

A message's field is the tensor of the same name in capitals, `[1, length]` on the wire. Data stays where it is: CPU
tensors share numpy's memory, GPU tensors are handed over by DLPack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from adaptive_verification.contract.messages import Message
from adaptive_verification.errors import ContractError

M = TypeVar("M", bound=Message)

_NUMPY_TYPES = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "UINT8": np.uint8}


def to_numpy(message: Message) -> dict[str, np.ndarray]:
    """Tensor name -> `[1, length]` array of the wire's type."""
    arrays = {}
    for field_name, spec in message.specs().items():
        array = getattr(message, field_name).cpu().numpy()
        arrays[spec.name] = array.view(_NUMPY_TYPES[spec.wire_type])[np.newaxis]
    return arrays


def from_numpy(message_type: type[M], get_array: Callable[[str], np.ndarray | None], reader: str | None = None) -> M:
    """The inverse of `to_numpy`; `get_array` returns None for a tensor that is not there.

    Args:
        reader: the stage whose copy this is; what it does not read is empty.

    Raises:
        ContractError: a tensor is missing, or has the wrong type or shape.
    """
    fields = {name: torch.empty(0, dtype=spec.dtype) for name, spec in message_type.specs().items()}
    for field_name, spec in message_type.specs(reader).items():
        array = get_array(spec.name)
        if array is None:
            raise ContractError(f"{spec.name} is missing; send an empty tensor where there is nothing to say")
        if array.dtype != _NUMPY_TYPES[spec.wire_type] or array.ndim != 2 or array.shape[0] != 1:
            raise ContractError(f"{spec.name} is {list(array.shape)} {array.dtype}; it must be [1, n] {spec.wire_type}")
        fields[field_name] = _tensor_over(array[0], spec.dtype)
    return message_type(**fields)


def to_triton(message: Message, pb_utils: Any) -> list[Any]:
    """The message as `pb_utils.Tensor`s."""
    tensors = []
    for field_name, spec in message.specs().items():
        tensor: Tensor = getattr(message, field_name)
        if tensor.is_cuda:
            tensors.append(pb_utils.Tensor.from_dlpack(spec.name, tensor[None]))
        else:
            array = tensor.numpy().view(_NUMPY_TYPES[spec.wire_type])
            tensors.append(pb_utils.Tensor(spec.name, array[np.newaxis]))
    return tensors


def from_triton(message_type: type[M], get_tensor: Callable[[str], Any], reader: str | None = None) -> M:
    """A message from `pb_utils.Tensor`s, otherwise as `from_numpy`.

    Raises:
        ContractError: as `from_numpy`.
    """
    on_gpu = {}

    def get_array(name: str) -> np.ndarray | None:
        tensor = get_tensor(name)
        if tensor is None or tensor.is_cpu():
            return None if tensor is None else tensor.as_numpy()
        on_gpu[name] = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
        spec = next(spec for spec in message_type.specs().values() if spec.name == name)
        return np.empty((1, 0), dtype=_NUMPY_TYPES[spec.wire_type])

    message = from_numpy(message_type, get_array, reader)
    for name, tensor in on_gpu.items():
        setattr(message, name.lower(), tensor[0])
    return message


def _tensor_over(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A torch tensor over the array's memory, 64-bit unsigned as int64 with the same bits."""
    if array.size == 0:
        return torch.empty(0, dtype=dtype)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)

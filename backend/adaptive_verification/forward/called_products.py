"""torch's packed product (see `linear`), called from compiled loops.

Called from Python a product has 19 us beside its arithmetic, called from a compiled loop 11; and a loop that calls it
itself has no Python before and after it. torch has a C interface for programs that it compiled ahead of time
(AOTInductor), which takes tensors by handles; three of its functions are used here.

Compiled loops come here by the functions' names, which are looked up when a loop is loaded: call `are_callable` before.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.addresses import as_pointer

_LIBRARY = "libtorch_cpu.so"
_ADDRESS = types.intp
_linear: Any = types.ExternalFunction("aoti_torch_cpu__linear_pointwise", types.int32(*[_ADDRESS] * 8))
_data: Any = types.ExternalFunction("aoti_torch_get_data_ptr", types.int32(_ADDRESS, _ADDRESS))
_delete: Any = types.ExternalFunction("aoti_torch_delete_tensor_object", types.int32(_ADDRESS))
_NO_ACTIVATION = np.frombuffer(b"none\0", dtype=np.uint8)


@functools.cache
def are_callable() -> bool:
    """Whether this build of torch has the functions; makes them known to compiled loops."""
    path = Path(torch.__file__).parent / "lib" / _LIBRARY
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return False
    if not all(hasattr(library, function.symbol) for function in (_linear, _data, _delete)):
        return False
    if not hasattr(torch._C, "_aoti"):
        return False
    llvmlite.binding.load_library_permanently(str(path))
    return True


class Handle:
    """A tensor as the C interface takes it; it lives as long as this does.

    Attributes:
        address: of the handle, not of the numbers.
    """

    def __init__(self, tensor: Tensor) -> None:
        (self._capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
        self.address: int = _pointer_of(self._capsule, None)

    def __del__(self) -> None:
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([self._capsule])


_pointer_of: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class PackedWeights:
    """A packed layer's weights and bias for `multiply`.

    Attributes:
        addresses: `[2]`, of the weights' handle and the bias's; 0 where there is none.
    """

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self._handles = [Handle(tensor) for tensor in (packed, bias) if tensor is not None]
        addresses = [handle.address for handle in self._handles]
        self.addresses: NDArray[np.intp] = np.array([*addresses, 0][:2], dtype=np.intp)


@compiled
def multiply(x: int, weights: Any) -> int:
    """The product with these weights (`PackedWeights.addresses`), to be given back with `let_go`.

    Args:
        x: address of a handle of bfloat16 rows `[n, in]`.

    Returns:
        Address of a handle of `[n, out]`.
    """
    bias = weights.ctypes.data + 8 if weights[1] != 0 else 0
    result = np.zeros(1, dtype=np.intp)
    if _linear(x, weights[0], bias, _NO_ACTIVATION.ctypes.data, 0, 0, 0, result.ctypes.data) != 0:
        raise RuntimeError("torch could not multiply; what it did not like is on its standard error")
    return result[0]


@compiled
def numbers_of(product: int) -> Any:
    """Where the numbers of a result of `multiply` are, for numba's `carray`; until it is given back."""
    where = np.zeros(1, dtype=np.intp)
    _data(product, where.ctypes.data)
    return as_pointer(where[0])


@compiled
def let_go(product: int) -> None:
    """Frees a result of `multiply`."""
    _delete(product)

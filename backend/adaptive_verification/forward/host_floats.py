"""Float32 and bfloat16 alike in compiled loops, and an exponential that the compiler can vectorize.

numpy and numba know no bfloat16. A tensor of that type is handed to a loop as its bits (uint16), which are the upper
half of a float32's. Arithmetic is in float32 either way: a loop reads with `widened` and writes with `narrowed`. Where
two neighbours belong together, as real and imaginary part do, they are read and written as one word, because loads of
every other number are slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.compiled import compiled

HOST_DTYPES = (torch.float32, torch.bfloat16)
"""Of tensors that `as_array` takes."""

Floats = NDArray[Any]
"""Float32, or the bits of bfloat16."""

_LOG2_E = np.float32(1.44269504)
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LARGEST_EXPONENT = np.float32(88.0)
_SMALLEST_EXPONENT = np.float32(-87.0)


def is_on_host(tensor: Tensor) -> bool:
    """Whether compiled loops can work on it."""
    return tensor.device.type == "cpu" and tensor.dtype in HOST_DTYPES


def as_array(tensor: Tensor) -> Floats:
    """The same memory as an array, of a tensor for which `is_on_host` holds."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Floats = tensor.numpy()
    return array


def as_floats(tensor: Tensor) -> Floats:
    """An array that `widened_all` takes, of a tensor of any float type on a CPU. Bfloat16 is left as it is: to be read
    once, instead of being written anew in twice the size first."""
    if tensor.dtype != torch.bfloat16:
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return as_array(tensor)


def as_pairs(array: Floats) -> NDArray[Any]:
    """Such an array, contiguous, as words of two neighbours each: half as many along the last dimension."""
    return array.view(np.uint32 if array.dtype == np.uint16 else np.uint64)


def widened(value: Any) -> Any:
    """An element of such an array as a float32. Only in compiled functions."""
    raise NotImplementedError


@overload(widened, strict=False)
def _widened(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def widened_all(values: Floats, room: NDArray[np.float32]) -> Any:
    """All elements of such an array, as numbers: the array itself, or what was written into the room."""
    if values.dtype != np.uint16:
        return values
    room[:] = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return room


@overload(widened_all, strict=False)
def _widened_all(values: Any, room: Any) -> Any:
    def into_room(values: Any, room: Any) -> Any:
        for i in range(len(values)):
            room[i] = widened(values[i])
        return room

    return into_room if values.dtype == types.uint16 else lambda values, room: values


def narrowed(value: Any, array: Any) -> Any:
    """A float32 as an element of the array, rounded to the nearest (to even). Only in compiled functions."""
    raise NotImplementedError


@overload(narrowed, strict=False)
def _narrowed(value: Any, array: Any) -> Any:
    if array.dtype == types.uint16:
        return lambda value, array: _rounded(value)
    return lambda value, array: value


@compiled
def _rounded(value: Any) -> Any:
    """The bits of a float32 as a bfloat16."""
    bits = np.float32(value).view(np.uint32)
    to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + to_even) >> np.uint32(16))
    # rounding could make a number, or infinity, of what is none
    return np.uint16(rounded if value == value else np.uint32(0x7FC0))


def pair(word: Any) -> Any:
    """The two numbers of a word as float32s. Only in compiled functions."""
    raise NotImplementedError


@overload(pair, strict=False)
def _pair(word: Any) -> Any:
    if word == types.uint32:
        return lambda word: (
            np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32),
            np.uint32(np.uint32(word) & np.uint32(0xFFFF0000)).view(np.float32),
        )
    return lambda word: (np.uint32(word).view(np.float32), np.uint32(word >> np.uint64(32)).view(np.float32))


def word(first: Any, second: Any, words: Any) -> Any:
    """Two float32s as an element of an array of words, rounded as `narrowed` does. Only in compiled functions."""
    raise NotImplementedError


@overload(word, strict=False)
def _word(first: Any, second: Any, words: Any) -> Any:
    if words.dtype == types.uint32:
        return lambda first, second, words: np.uint32(
            np.uint32(_rounded(first)) | np.uint32(np.uint32(_rounded(second)) << np.uint32(16))
        )
    return lambda first, second, words: np.uint64(
        np.uint64(np.float32(first).view(np.uint32)) | (np.uint64(np.float32(second).view(np.uint32)) << np.uint64(32))
    )


@compiled(fastmath={"contract"})
def exponential(x: Any) -> Any:
    """exp(x) of a float32, to two units in the last place between -87 and 88, and beyond what it is there.

    A call to the C library's, which numba makes of `math.exp`, keeps a loop from being vectorized. The polynomial is
    that of Cephes' `expf` (S. Moshier, 1989).
    """
    x = min(max(x, _SMALLEST_EXPONENT), _LARGEST_EXPONENT)
    power = np.floor(x * _LOG2_E + np.float32(0.5))
    rest = x - power * _LN_2_HIGH - power * _LN_2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1)
    return series * np.int32(np.int32(np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)

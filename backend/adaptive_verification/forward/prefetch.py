"""Has memory come into a processor's cache while a compiled loop still works on something else.

A processor guesses what is read next only within a page of 4 KiB, and starts anew in every one. A loop that knows which
memory comes next says so early enough, and neither waits for the other.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from adaptive_verification.compiled import compiled

_LINE_BYTES = 64
_READ, _SECOND_LEVEL, _DATA = 0, 2, 1


def add_prefetch(builder: Any, address: Any) -> None:
    """Adds the instruction for the line at an address to a function that is being built (`llvmlite.ir.IRBuilder`)."""
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
    pointer = builder.inttoptr(address, cgutils.voidptr_t)
    builder.call(function, [pointer, word(_READ), word(_SECOND_LEVEL), word(_DATA)])


def _prefetch_line(typing_context: Any, address: Any) -> Any:
    def fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        add_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), fetch


_line: Any = intrinsic(_prefetch_line)


@compiled(inline="always")
def prefetch(array: Any, start: int, count: int) -> None:
    """`count` elements of a contiguous array, from flat index `start` on; into the second-level cache, as the first one
    has room for what is being worked on and little more. Only in compiled functions."""
    first = array.ctypes.data + start * array.itemsize
    for line in range(0, count * array.itemsize, _LINE_BYTES):
        _line(first + line)

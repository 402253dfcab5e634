"""Memory that compiled loops know by its address."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _as_pointer_of(typing_context: Any, address: Any) -> Any:
    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), convert


as_pointer: Any = intrinsic(_as_pointer_of)
"""A number as a pointer that numba's `carray` takes. Only in compiled functions."""

"""Loops over a few hundred numbers as machine code (numba).

Written with numpy such a loop is a dozen calls. Each costs microseconds, not for its arithmetic, but because its code
and data have left the caches since the last step. A compiled loop is one call, and reads like the rule that it carries
out.

What is compiled is kept on disk, where there is a place for it, in a directory for just these sources: numba by itself
sees changes of a function's own file, but not of the compiled functions that it calls. Plain loops compile in half a
second, array operations (slices that are assigned, `where`, `partition`) in several. Nothing checks indices: whoever
calls has done so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numba

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent


def _sources() -> list[Path]:
    """All files that compiled functions are in."""
    return sorted(file for file in _PACKAGE.rglob("*.py") if b"compiled" in file.read_bytes())


def _directory_for(sources: list[Path]) -> str:
    """Where functions compiled from these sources are kept, in the directory that numba has been told, if any."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return str(Path(_TOLD or _PACKAGE / "__pycache__") / digest[:16])


_TOLD: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]  # made at run time
numba.config.CACHE_DIR = _directory_for(_sources())  # type: ignore[attr-defined]


@overload
def compiled(function: F) -> F: ...


@overload
def compiled(*, signature: str | None = None, **options: Any) -> Callable[[F], F]: ...


def compiled(function: F | None = None, *, signature: str | None = None, **options: Any) -> F | Callable[[F], F]:
    """The function, compiled when it is first called with arguments of such types; x / 0 is inf or NaN.

    Args:
        function: left out where there are other arguments: `@compiled(parallel=True)`.
        signature: of the arguments it is compiled for, at once.
        options: numba's.
    """
    if function is None:
        return lambda decorated: _compiled(decorated, signature, options)
    return _compiled(function, signature, options)


def _compiled(function: F, signature: str | None, options: dict[str, Any]) -> F:
    options = {"error_model": "numpy", "nogil": True, **options}
    try:
        return cast(F, numba.njit(signature, cache=True, **options)(function))
    except RuntimeError:  # no directory to keep it in
        return cast(F, numba.njit(signature, **options)(function))

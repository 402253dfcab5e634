"""Prefetching is a hint, of which no result tells anything: here is what is asked for, and that it is asked."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from adaptive_verification.forward import prefetch as module
from adaptive_verification.forward.prefetch import prefetch

LINE_BYTES = 64


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_every_line_of_the_elements_is_asked_for_once(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    array: np.ndarray = np.zeros((8, 64), dtype)
    asked: list[int] = []
    monkeypatch.setattr(module, "_line", asked.append)
    interpreted = prefetch.py_func  # type: ignore[attr-defined]  # what numba compiled
    interpreted(array, 2 * 64, 4 * 64)
    first, end = array[2].ctypes.data, array[6].ctypes.data
    assert asked == list(range(first, end, LINE_BYTES))


def test_compiled_code_has_the_instruction() -> None:
    @numba.njit
    def fetch(array: np.ndarray) -> None:
        prefetch(array, 0, 16)

    array = np.ones(16, np.float32)
    fetch(array)
    (code,) = fetch.inspect_llvm().values()
    assert "call void @llvm.prefetch" in code
    assert (array == 1).all()

"""The first so many positions of each row, as masks. Looked up in a table, which takes a tenth of comparing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray


def prefixes(counts: NDArray[Any], depth: int) -> NDArray[np.bool_]:
    """`[rows, depth]`: whether a position is among the first `count` of its row; counts `[rows]`, at least 0."""
    return _by_count(depth).take(counts, 0, mode="clip")


@functools.cache
def _by_count(depth: int) -> NDArray[np.bool_]:
    return np.tri(depth + 1, depth, -1, dtype=bool)

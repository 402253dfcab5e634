"""The first so many positions of each row."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive_verification.estimation.prefixes import prefixes


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefixes_are_what_comparing_positions_gives_also_beyond_the_depth(depth: int) -> None:
    counts = np.array([0, 1, 2, 3, 9])
    assert prefixes(counts, depth).tolist() == (np.arange(depth) < counts[:, None]).tolist()


def test_no_rows_have_no_prefixes() -> None:
    assert prefixes(np.empty(0, dtype=np.int64), 3).shape == (0, 3)

"""How many drafts were made, admitted and accepted since the state began. Counters only, for people to look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAFTED, ADMITTED, ACCEPTED = range(3)
"""The kinds: places of the first axis."""


class DraftCounts:
    """Counters by kind.

    Args:
        num_positions: K.
    """

    def __init__(self, num_positions: int) -> None:
        self._rows_by_count = np.zeros((3, num_positions + 1), dtype=np.int64)  # [kind, drafts of a row]
        self.looked_up = np.zeros(3, dtype=np.int64)
        """`[kind]`: those of them that were looked up."""

    @property
    def by_position(self) -> NDArray[np.int64]:
        """`[kind, position]`: rows that had a draft there."""
        return self._rows_by_count[:, :0:-1].cumsum(1)[:, ::-1]

    def add(self, kind: int, counts: NDArray[Any], looked_up: NDArray[np.bool_]) -> None:
        """Adds rows' numbers of drafts `[rows]`, at most K; `looked_up` `[rows]` says whose were."""
        by_count = self._rows_by_count[kind]
        by_count += np.bincount(counts, minlength=len(by_count))
        if np.count_nonzero(looked_up):
            self.looked_up[kind] += counts[looked_up].sum()

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.by_position.tolist(), "looked_up_counts": self.looked_up.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; nothing has changed then.
        """
        by_position = np.asarray(state["counts"], dtype=np.int64)
        # files from before drafts were looked up have no counts of them
        looked_up = np.asarray(state.get("looked_up_counts", [0, 0, 0]), dtype=np.int64)
        if by_position.shape != self.by_position.shape:
            raise ValueError(f"counts must be {list(self.by_position.shape)} numbers")
        if (np.diff(by_position, axis=1) > 0).any() or (by_position < 0).any():
            raise ValueError("counts must be at least 0 and never rise from position to position")
        if looked_up.shape != self.looked_up.shape:
            raise ValueError("looked_up_counts must be 3 numbers")
        self._rows_by_count[:] = -np.diff(by_position, axis=1, prepend=0, append=0)
        self._rows_by_count[:, 0] = 0  # of rows without drafts nothing is counted
        self.looked_up = looked_up

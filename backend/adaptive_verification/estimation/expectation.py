"""What the next block is expected to survive, from what was known before it is drafted.

The budget of a block must not depend on the block itself, so it is chosen from the sequence's previous block; where
that did not reach, or there was none, from the running mean acceptance of each position (before anything was seen, 1
or what the drafter says of itself).
The depth plan looks at a sample of everybody's recent blocks: one unlucky block is no reason to stop drafting.

Shapes `[rows, K]`. Knows probabilities only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE_SIZE = 64
"""Recent blocks that the depth plan looks at, whatever the number of rows."""
_KEEP_PER_STEP = 0.98
"""The running mean's memory: the last 50 steps or so."""


class Expectation:
    """Running mean acceptance by position, and a sample of recent blocks.

    The sample starts as blocks like the mean. It is not part of the state: after a restart it is soon full again.

    Args:
        num_positions: K.
        first_acceptance: `[K]`, the mean of positions of which nothing was seen. By default they survive wholly, so
            drafting is tried before it is judged.
    """

    def __init__(self, num_positions: int, first_acceptance: Sequence[float] | None = None) -> None:
        self._sums = np.ones((2, num_positions), dtype=np.float32)  # of predictions and of drafts; one draft to start
        if first_acceptance is not None:
            self._sums[0] = first_acceptance
        self.recent_survival = np.tile(self.mean_survival, (SAMPLE_SIZE, 1))
        self._oldest = 0

    @property
    def mean_acceptance(self) -> NDArray[np.float32]:
        """`[K]`."""
        return self._sums[0] / self._sums[1]

    @property
    def mean_survival(self) -> NDArray[np.float32]:
        """`[K]`, of a block of which nothing else is known."""
        return self.mean_acceptance.cumprod()

    def add(
        self, acceptance: NDArray[np.float32], drafted: NDArray[np.bool_], whole_survival: NDArray[np.float32]
    ) -> None:
        """Counts one step's predictions where drafted (the first so many of a row), and their whole blocks' survivals.

        All `[rows, K]`.
        """
        weight = drafted.astype(np.float32)
        one = np.ones(len(weight), dtype=np.float32)
        drafts = one @ weight  # sums over the rows, in half the time of `sum(0)`
        depth = np.count_nonzero(drafts)
        if depth == 0:
            return
        sums = self._sums[:, :depth]
        sums *= np.float32(_KEEP_PER_STEP)
        weight *= acceptance
        sums[0] += (one @ weight)[:depth]
        sums[1] += drafts[:depth]
        (blocks,) = drafted[:, 0].nonzero()
        newest = self._oldest + np.arange(min(SAMPLE_SIZE, blocks.size))
        self.recent_survival[newest % SAMPLE_SIZE] = whole_survival[blocks[newest % blocks.size]]  # rows take turns
        self._oldest += newest.size

    def whole_block(self, acceptance: NDArray[np.float32], drafted: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Acceptance of a block, the mean where nothing was drafted; all `[rows, K]`."""
        return np.where(drafted, acceptance, self.mean_acceptance)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; nothing has changed then.
        """
        sums = np.asarray(state["sums"], dtype=np.float32)
        if sums.shape != self._sums.shape or not (
            np.isfinite(sums).all() and (sums >= 0).all() and (sums[1] > 0).all()
        ):
            raise ValueError(f"sums must be {list(self._sums.shape)} finite numbers, drafts above 0")
        self._sums = sums

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

from adaptive_verification.compiled import compiled

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
        self, acceptance: NDArray[np.float32], counts: NDArray[np.int64], whole_survival: NDArray[np.float32]
    ) -> None:
        """Counts one step's blocks.

        Args:
            acceptance: `[rows, K]`, as predicted.
            counts: `[rows]`, how many of them are drafts.
            whole_survival: `[rows, K]`.
        """
        self._oldest += _add(self._sums, self.recent_survival, self._oldest, acceptance, counts, whole_survival)

    def whole_block(self, acceptance: NDArray[np.float32], counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Acceptance of blocks `[rows, K]` that go on, behind their drafts, with the mean.

        Args:
            acceptance: `[rows, K]`, as predicted.
            counts: `[rows]`, how many of them are drafts.
        """
        return _whole_block(acceptance, counts, self.mean_acceptance)

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


@compiled
def _whole_block(
    acceptance: NDArray[np.float32], counts: NDArray[np.int64], mean_acceptance: NDArray[np.float32]
) -> NDArray[np.float32]:
    block = np.empty_like(acceptance)
    rows, num_positions = block.shape
    for row in range(rows):
        for position in range(num_positions):
            is_drafted = position < counts[row]
            block[row, position] = acceptance[row, position] if is_drafted else mean_acceptance[position]
    return block


@compiled
def _add(
    sums: NDArray[np.float32],
    recent_survival: NDArray[np.float32],
    oldest: int,
    acceptance: NDArray[np.float32],
    counts: NDArray[np.int64],
    whole_survival: NDArray[np.float32],
) -> int:
    """Brings sums and sample up to date; how many blocks the sample took up."""
    num_positions = sums.shape[1]
    (blocks,) = (counts > 0).nonzero()
    for position in range(num_positions):
        drafts, expected = 0, 0.0
        for row in blocks:
            if position < counts[row]:
                drafts += 1
                expected += acceptance[row, position]
        if drafts:
            sums[0, position] = sums[0, position] * _KEEP_PER_STEP + expected
            sums[1, position] = sums[1, position] * _KEEP_PER_STEP + drafts
    taken_up = min(SAMPLE_SIZE, len(blocks))
    for place in range(oldest, oldest + taken_up):
        for position in range(num_positions):  # rows take turns
            recent_survival[place % SAMPLE_SIZE, position] = whole_survival[blocks[place % len(blocks)], position]
    return taken_up

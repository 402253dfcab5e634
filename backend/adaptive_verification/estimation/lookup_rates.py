"""How often looked-up drafts are accepted, by the length of their match and their position: counts instead of a fit.

A looked-up draft has no logits, so it is judged by what became of earlier ones like it, given that all drafts before it
in its block were accepted: `p = (accepted + a) / (decided + a + b)`, the mean of a beta distribution. The counts fade,
which lets p follow drift as the fit does, and returns to the prior what is no longer seen.

Lossless: match length and position are known before the block, the counts before the step. Nothing of the block's own
tokens is in p; that they are a function of the confirmed tokens would even allow more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MATCH_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The shortest match of each bucket."""
PRIOR_ACCEPTED = 3.0
PRIOR_REJECTED = 1.0
"""As if four drafts had been decided: between what matches of 4 tokens and of 16 give (perf/results/lookup.md), and
high enough that the first drafts are verified and counted."""
KEPT_PER_INTERVAL = 0.9
"""Share of the counts that each interval leaves: half of them after 6.6 intervals."""


class LookupRates:
    """Faded counts, `[buckets, K]`.

    Args:
        num_positions: K.
        interval: steps with labels, after which the counts fade: the fit's `refit_interval`.
    """

    def __init__(self, num_positions: int, interval: int) -> None:
        self._interval = interval
        self._steps = 0
        # [2, buckets, K]: accepted ones, and all that the target decided
        self._counts = np.zeros((2, len(MATCH_LENGTHS), num_positions))

    def predict(self, match_length: NDArray[np.int64]) -> NDArray[np.float32]:
        """Acceptance probabilities `[rows, K]` of rows with matches of these lengths `[rows]`, at least 1."""
        accepted, decided = self._counts[:, _bucket(match_length)]
        p = (accepted + PRIOR_ACCEPTED) / (decided + (PRIOR_ACCEPTED + PRIOR_REJECTED))
        return p.astype(np.float32)

    def fold(
        self, match_length: NDArray[np.int64], accepted: NDArray[np.float32], labelled: NDArray[np.float32]
    ) -> None:
        """Adds one step's labels: `[rows]`, and 0 or 1 `[rows, K]`. Without rows it is a step too."""
        if match_length.size > 0:
            bucket = _bucket(match_length)
            np.add.at(self._counts[0], bucket, accepted * labelled)
            np.add.at(self._counts[1], bucket, labelled)
        self._steps += 1
        if self._steps == self._interval:
            self._steps = 0
            self._counts *= KEPT_PER_INTERVAL

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self._counts.tolist(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError, KeyError, TypeError: the state is not one; nothing has changed then.
        """
        counts, steps = np.asarray(state["counts"], dtype=np.float64), int(state["steps"])
        if counts.shape != self._counts.shape or not np.isfinite(counts).all():
            raise ValueError(f"counts must be {list(self._counts.shape)} finite numbers")
        if not ((counts[0] >= 0) & (counts[0] <= counts[1])).all():
            raise ValueError("counts must be at least 0, and accepted ones at most those decided")
        self._counts, self._steps = counts, steps % self._interval


def _bucket(match_length: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(MATCH_LENGTHS, match_length, side="right") - 1

"""What steps contain besides the drafts that a plan is about: means over the last steps, for plans of the next ones.

A single step says little about the next: prompts come in bursts, and a row is looked up in one step and not in the
other. A plan made for the present step would change with each of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE = 0.02
"""The means are those of the last fifty steps or so."""


class TypicalStep:
    """Means."""

    def __init__(self) -> None:
        self.prompt_tokens = 0.0
        self.looked_up_share = 0.0
        """Of the rows that sample: those whose drafts are looked up."""
        self._looked_up_drafts = 0.0

    @property
    def drafts_per_looked_up_row(self) -> float:
        """Admitted ones."""
        return self._looked_up_drafts / self.looked_up_share if self.looked_up_share > 0 else 0.0

    def add(
        self, prompt_tokens: int, sampling_rows: int, looked_up: NDArray[np.bool_], admitted: NDArray[np.int64]
    ) -> None:
        """Counts one step, of `[rows]` looked up or not, and with so many drafts admitted."""
        self.prompt_tokens += LEARNING_RATE * (prompt_tokens - self.prompt_tokens)
        if sampling_rows > 0:
            share, drafts = np.count_nonzero(looked_up) / sampling_rows, admitted[looked_up].sum() / sampling_rows
            self.looked_up_share += LEARNING_RATE * (share - self.looked_up_share)
            self._looked_up_drafts += LEARNING_RATE * (drafts - self._looked_up_drafts)

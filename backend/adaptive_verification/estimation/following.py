"""Which sequences a hidden-state drafter follows: whose hidden states the verifier hands on.

Handing on costs some percent of a step, for nothing where no model drafts. While the plan drafts, everybody who begins
is followed; else a few, who explore, so that it shows when drafting pays again. A state that was not handed on is lost,
so a sequence that is not followed stays so until it begins anew; what can be looked up it drafts all the same.

Knows masks of rows; nothing of states. All `[rows]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS_PER_FOLLOWED_ROW = 8
"""While nothing is drafted, one row in so many (but one in any case) is followed."""


def newly_followed(begins: NDArray[np.bool_], followed: NDArray[np.bool_], depth: int) -> NDArray[np.bool_]:
    """Which of the rows that begin are followed.

    Args:
        begins: rows that send their first tokens, and may be drafted for.
        followed: the other rows that are.
        depth: how deep the next step drafts.
    """
    if depth > 0:
        return begins
    wanted = -(-len(begins) // ROWS_PER_FOLLOWED_ROW) - np.count_nonzero(followed)
    return begins & (begins.cumsum() <= wanted)

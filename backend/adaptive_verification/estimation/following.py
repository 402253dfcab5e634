"""Which sequences a hidden-state drafter follows: whose hidden states the verifier hands on.

Handing on costs some percent of a step, for nothing where no model drafts. While the plan drafts, everybody who begins
is followed, and of the others one more with every step: they are handed all their states at once. Else a few are, who
explore, so that it shows when drafting pays again. Who is followed stays so.

Knows masks of rows; nothing of states. All `[rows]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS_PER_FOLLOWED_ROW = 8
"""While nothing is drafted, one row in so many (but one in any case) is followed."""


def newly_followed(
    candidates: NDArray[np.bool_], begins: NDArray[np.bool_], followed: NDArray[np.bool_], depth: int
) -> NDArray[np.bool_]:
    """Which further rows are followed.

    Args:
        candidates: rows that are not followed, and may be drafted for.
        begins: rows that send their first tokens.
        followed: rows that are.
        depth: how deep the next step drafts.
    """
    beginners, late = candidates & begins, candidates & ~begins
    first_late = late & (late.cumsum() == 1)
    if depth > 0:
        return beginners | first_late
    num_followed = np.count_nonzero(followed)
    wanted = -(-len(candidates) // ROWS_PER_FOLLOWED_ROW) - num_followed
    chosen = beginners & (beginners.cumsum() <= wanted)
    return first_late if num_followed == 0 and not chosen.any() else chosen

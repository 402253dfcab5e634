"""What a request's own past says about its next drafts: has it been accepted more or less often than predicted?

`h = sum(y - p) / (sum(p (1 - p)) + PRIOR_INFORMATION)` over its earlier labels, with p the prediction without h. That
is one Newton step towards an intercept of the request's own, shrunk towards none. It is known before the block is
drafted, so using it is lossless. Shapes: `[rows]` where not said otherwise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PRIOR_INFORMATION = 6.0
"""Shrinkage: the information of some 30 labels (at p (1 - p) = 1/5) that say "as everybody". Chosen offline on 16,825
labels of the default pair, where 20 to 40 labels did equally well."""


def history_feature(residual_sum: NDArray[np.float32], information_sum: NDArray[np.float32]) -> NDArray[np.float32]:
    """The feature h of each sequence; 0 for one without labels."""
    return residual_sum / (information_sum + np.float32(PRIOR_INFORMATION))


def history_increments(
    probability: NDArray[np.float32], accepted: NDArray[np.float32], labelled: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What one step's labels add to the two sums. Arguments `[rows, K]`: predictions without h, 0 or 1, 0 or 1."""
    residual = np.einsum("rk,rk->r", accepted - probability, labelled)
    information = np.einsum("rk,rk->r", probability * labelled, 1 - probability)
    return residual, information

"""What a request's own past says about its next drafts: has it been accepted more or less often than predicted?

`h = sum(y - p) / (sum(p (1 - p)) + PRIOR_INFORMATION)` over its earlier labels, with p the prediction without h. That
is one Newton step towards an intercept of the request's own, shrunk towards none. It is known before the block is
drafted, so using it is lossless. Shapes: `[rows]` where not said otherwise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled

PRIOR_INFORMATION = 6.0
"""Shrinkage: the information of some 30 labels (at p (1 - p) = 1/5) that say "as everybody". Chosen offline on 16,825
labels of the default pair, where 20 to 40 labels did equally well."""


def history_feature(residual_sum: NDArray[np.float32], information_sum: NDArray[np.float32]) -> NDArray[np.float32]:
    """The feature h of each sequence; 0 for one without labels."""
    return residual_sum / (information_sum + np.float32(PRIOR_INFORMATION))


@compiled
def with_and_without_history(feature: NDArray[np.float32], history: NDArray[np.float32]) -> NDArray[np.float32]:
    """What drafts are predicted from, `[2, rows, K, 2]`: their own feature `[rows, K]`, and their sequence's history
    `[rows]` or nothing."""
    rows, num_positions = feature.shape
    design = np.zeros((2, rows, num_positions, 2), np.float32)
    for row in range(rows):
        for position in range(num_positions):
            design[0, row, position, 0] = feature[row, position]
            design[0, row, position, 1] = history[row]
            design[1, row, position, 0] = feature[row, position]
    return design


@compiled
def history_increments(
    probability: NDArray[np.float32], accepted: NDArray[np.float32], labelled: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What one step's labels add to the two sums. Arguments `[rows, K]`: predictions without h, 0 or 1, 0 or 1."""
    rows, num_positions = probability.shape
    residual, information = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    for row in range(rows):
        for position in range(num_positions):
            p = probability[row, position]
            residual[row] += labelled[row, position] * (accepted[row, position] - p)
            information[row] += labelled[row, position] * p * (1 - p)
    return residual, information

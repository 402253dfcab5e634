"""How many drafts to verify, and which: the best slots of the whole batch, as many as pay for themselves.

Pure functions of tensors, so that their losslessness can be enumerated. It rests on these rules:

1. A draft's acceptance probability depends on the tokens before it, never on the token itself (`features`).
2. `best_budget` is given what was known before the block was drafted, never the block's own probabilities: those of
   deeper drafts depend on the very tokens that are being admitted.
3. `admit` breaks ties by position, then by row, never by anything that depends on token values.

Survival never rises along a row, so the best slots always form prefixes, and walking through them in order is the same
as revealing one draft after another, deciding about each before it is seen.

Shapes: `[rows, K]` padded; a row's first `count` positions exist. Host arrays, float32 or float64: they are small, and
many little operations cost less there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.estimation.prefixes import prefixes


def survival(acceptance: NDArray[Any]) -> NDArray[Any]:
    """Probability that a draft and all before it in its row are accepted, `[rows, K]` from acceptance `[rows, K]`.

    Factors are at most 1, so rounding cannot make it rise along a row.
    """
    return np.minimum(np.maximum(acceptance, 0.0), 1.0).cumprod(1)


def best_slots(survivals: NDArray[Any], counts: NDArray[Any] | None) -> NDArray[np.intp]:
    """The slots that exist, best first; equal ones shallow first, then by row.

    Args:
        survivals: `[rows, K]`.
        counts: `[rows]`, at most K; None: all slots exist.

    Returns:
        `position * rows + row` of each slot, `[sum of counts]`.
    """
    by_position = -survivals.T.ravel()  # shallow first, then by row
    if counts is None:
        return by_position.argsort(kind="stable")
    (slots,) = prefixes(counts, survivals.shape[1]).T.ravel().nonzero()
    return slots[by_position[slots].argsort(kind="stable")]


def admit(survivals: NDArray[Any], counts: NDArray[Any], budget: int) -> NDArray[np.int64]:
    """Admitted drafts of each row: how many of the `budget` best slots are its own.

    Args:
        survivals: `[rows, K]`, never rising along a row.
        counts: `[rows]`, drafts of each row, at most K.
        budget: drafts to admit in the whole batch; more than there are admits all.

    Returns:
        `[rows]` int64, at most `counts`.
    """
    rows = len(counts)
    return np.bincount(best_slots(survivals, counts)[:budget] % max(rows, 1), minlength=rows)


def best_budget(survivals: NDArray[Any], counts: NDArray[Any], sampling_rows: int, step_ms: NDArray[np.float64]) -> int:
    """The number of drafts whose verification gives the most expected tokens per millisecond.

    `(sampling_rows + sum of the B largest survivals) / step_ms[B]`, largest over B; of equal ones the smallest B.

    Args:
        survivals: `[rows, K]`, **expected ones, known before the block was drafted** (rule 2).
        counts: `[rows]`, slots that this step may fill, also known before.
        sampling_rows: rows that get a token in any case.
        step_ms: `[1 + sum of counts]`, cost of the whole step that verifies 0, 1, 2, ... drafts.
    """
    competing = survivals[prefixes(counts, survivals.shape[1])]
    competing.sort()
    tokens = np.empty(len(step_ms))
    tokens[0] = 0.0
    np.cumsum(competing[::-1], out=tokens[1:])  # which of equal ones comes first is no matter here
    tokens += sampling_rows
    tokens /= step_ms
    return int(tokens.argmax())

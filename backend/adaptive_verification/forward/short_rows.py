"""Attention of rows with few tokens on a CPU, straight from the slot cache: every row at its own length.

Decoding rows bring one token each, and a few drafts where these are verified, and look back at contexts of all lengths.
As batched matrix products they would have to be padded to the longest row, masked, and grouped by the slots they happen
to be in. Here one compiled loop (numba) goes over rows and key-value heads and reads each row's keys and values once.
A row's numbers do not depend on the other rows of its batch.

Only float32: numba knows no bfloat16, and long rows are better off with matrix products (`segments`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.row import Row

MOST_TOKENS = 8
"""Rows with more tokens are attended to as fast by matrix products."""
FEWEST_POSITIONS = 800
"""Of all such rows together. With fewer, what is gained is lost again: while numba's threads work torch's fall asleep,
and its next operation must wake them."""
_FEWEST_PARTS = 8
"""With fewer rows times key-value heads, a group's query heads are divided among the threads, too."""
_SIGNATURE = (
    "void(float32[:,:,:], float32[:,:,:,::1], float32[:,:,:,::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], float32, int64, float32[:,:,::1])"
)


def short_rows(rows: Sequence[Row], dtype: torch.dtype, device: torch.device) -> NDArray[np.bool_]:
    """Which rows of a batch are to be attended to here."""
    if dtype != torch.float32 or device.type != "cpu":
        return np.zeros(len(rows), dtype=bool)
    lengths = np.array([row.query_length for row in rows])
    contexts = np.array([row.context_length for row in rows])
    are_short = lengths <= MOST_TOKENS
    positions = (contexts + lengths)[are_short].sum()
    return are_short & (positions >= FEWEST_POSITIONS)


class ShortRows:
    """Some rows of a packed batch, for all layers of one forward."""

    def __init__(self, rows: Sequence[Row], first_token: NDArray[np.int64]) -> None:
        """`first_token`: `[rows]`, packed places; rows in the batch's order."""
        lengths = np.array([row.query_length for row in rows], dtype=np.int64)
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        contexts = np.array([row.context_length for row in rows], dtype=np.int64)
        self._rows = (slots, contexts, lengths, first_token, lengths.cumsum() - lengths)
        self._num_tokens = int(lengths.sum())
        most_threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # made at run time
        numba.set_num_threads(min(torch.get_num_threads(), most_threads))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """As `SegmentedRows.attend`."""
        kv_heads = keys.shape[1]
        groups = query.shape[1] // kv_heads
        heads_per_part = groups if len(self._rows[0]) * kv_heads >= _FEWEST_PARTS else 1
        output = query.new_empty(self._num_tokens, query.shape[1], values.shape[-1])
        arrays = (tensor.numpy() for tensor in (query, keys, values))
        _compiled()(*arrays, *self._rows, scaling, heads_per_part, output.numpy())
        return output


@functools.cache
def _compiled() -> Callable[..., None]:
    options = {"parallel": True, "fastmath": {"reassoc", "contract", "arcp", "nsz"}}
    return compiled(signature=_SIGNATURE, **options)(_attend)


def _attend(
    query: Any,
    keys: Any,
    values: Any,
    slots: Any,
    contexts: Any,
    lengths: Any,
    first_queries: Any,
    first_outputs: Any,
    scaling: Any,
    heads_per_part: Any,
    output: Any,
) -> None:
    """Each part is a row and some query heads that share a key-value head: `m` queries in all, token by token.

    Four positions of the context at a time, so that a query, or an output, is loaded once for all of them.
    """
    kv_heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    groups = query.shape[1] // kv_heads
    parts_per_head = groups // heads_per_part
    for part in numba.prange(len(slots) * kv_heads * parts_per_head):
        row = part // (kv_heads * parts_per_head)
        kv_head = part // parts_per_head % kv_heads
        first_head = kv_head * groups + part % parts_per_head * heads_per_part
        first_query, first_output, context = first_queries[row], first_outputs[row], contexts[row]
        total = context + lengths[row]
        num_queries = lengths[row] * heads_per_part
        row_keys, row_values = keys[slots[row], kv_head], values[slots[row], kv_head]

        queries = np.empty((num_queries, key_dim), dtype=np.float32)
        for i in range(num_queries):
            head = query[first_query + i // heads_per_part, first_head + i % heads_per_part]
            for d in range(key_dim):
                queries[i, d] = head[d] * scaling

        weights = np.empty((num_queries, total), dtype=np.float32)
        in_fours = total - total % 4
        for t in range(0, in_fours, 4):
            key0, key1, key2, key3 = row_keys[t], row_keys[t + 1], row_keys[t + 2], row_keys[t + 3]
            for i in range(num_queries):
                one = queries[i]
                score0 = score1 = score2 = score3 = np.float32(0)
                for d in range(key_dim):
                    score0 += one[d] * key0[d]
                    score1 += one[d] * key1[d]
                    score2 += one[d] * key2[d]
                    score3 += one[d] * key3[d]
                weights[i, t], weights[i, t + 1], weights[i, t + 2], weights[i, t + 3] = score0, score1, score2, score3
        for t in range(in_fours, total):
            for i in range(num_queries):
                score0 = np.float32(0)
                for d in range(key_dim):
                    score0 += queries[i, d] * row_keys[t, d]
                weights[i, t] = score0

        for i in range(num_queries):
            one = weights[i]
            visible = context + i // heads_per_part + 1
            largest = one[0]
            for t in range(1, visible):
                largest = max(largest, one[t])
            normalizer = np.float32(0)
            for t in range(visible):
                one[t] = math.exp(one[t] - largest)
                normalizer += one[t]
            for t in range(visible):
                one[t] /= normalizer
            for t in range(visible, total):
                one[t] = 0

        sums = np.zeros((num_queries, value_dim), dtype=np.float32)
        for t in range(0, in_fours, 4):
            value0, value1, value2, value3 = row_values[t], row_values[t + 1], row_values[t + 2], row_values[t + 3]
            for i in range(num_queries):
                weight0, weight1, weight2, weight3 = (
                    weights[i, t],
                    weights[i, t + 1],
                    weights[i, t + 2],
                    weights[i, t + 3],
                )
                one = sums[i]
                for d in range(value_dim):
                    one[d] += weight0 * value0[d] + weight1 * value1[d] + weight2 * value2[d] + weight3 * value3[d]
        for t in range(in_fours, total):
            for i in range(num_queries):
                for d in range(value_dim):
                    sums[i, d] += weights[i, t] * row_values[t, d]
        for i in range(num_queries):
            for d in range(value_dim):
                output[first_output + i // heads_per_part, first_head + i % heads_per_part, d] = sums[i, d]

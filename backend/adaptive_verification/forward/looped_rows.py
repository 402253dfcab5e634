"""Attention on a CPU by a compiled loop, straight from the slot cache: every row at its own length.

Decoding rows bring one token each, and a few drafts where these are verified, and look back at contexts of all lengths.
As batched matrix products they would have to be padded to the longest row, masked, and grouped by the slots they happen
to be in. Here one compiled loop (numba) goes over rows and key-value heads and reads each row's keys and values once.
A row's numbers do not depend on the other rows of its batch, where heads are wide enough to fill the processor's lanes
(16 and up; narrower ones some compilers add in another order for more queries).

Prompts are cut into pieces, none of which looks at what only later ones see: half of the work of a matrix product with
a mask. Only where the processor multiplies in tiles are rows of many tokens better off in `segments`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.host_floats import Floats, exponential, narrowed, widened
from adaptive_verification.forward.placement import multiplies_in_tiles
from adaptive_verification.forward.prefetch import prefetch
from adaptive_verification.forward.row import Row

MOST_TOKENS_BESIDE_TILES = 8
"""In tiles of bfloat16 rows with more tokens are attended to faster by matrix products."""
PIECE_TOKENS = 16
"""Longer pieces compute more that is hidden, shorter ones read keys and values more often."""
POSITIONS_OF_ONE_THREAD = 800
"""Up to so many that all tokens together look back at, one thread does it: while numba's other threads work torch's
fall asleep, and its next operation must wake them."""
_QUERIES_AT_A_TIME = 3
"""As many as `_score` and `_sum` are written out for: so many query heads of the default target share a key-value head,
and what is loaded and widened for all of them leaves registers for their sums."""
_FEWEST_PARTS = 8
"""With fewer pieces times key-value heads, query heads that share one are divided among the threads, too."""
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_SIGNATURE = (
    "void({floats}[:,:,:], {floats}[:,:,:,::1], {floats}[:,:,:,::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " float32, {floats}[:,:,::1])"
)


def are_looped(rows: Sequence[Row], dtype: torch.dtype) -> NDArray[np.bool_]:
    """Which rows `[rows]` of a batch on the host are to be attended to here."""
    if dtype != torch.bfloat16 or not multiplies_in_tiles():
        return np.ones(len(rows), dtype=bool)
    lengths = np.array([row.query_length for row in rows])
    contexts = np.array([row.context_length for row in rows])
    looped = lengths <= MOST_TOKENS_BESIDE_TILES
    if looped.any():
        positions = (contexts + lengths)[looped]
        here = positions @ _cost_here(lengths[looped])
        padded = positions.max() * len(positions) * _cost_in_segments(lengths[looped].max())
        looped &= here <= padded
    return looped


def _cost_here(query_length: Any) -> Any:
    """Nanoseconds for each position that a row looks back at, one layer of the default target (2 cores with AMX).

    Measured with a loop that took one query at a time; the present one is faster, so some rows that could be looped
    still go to `segments`.
    """
    return 16 + 26 * query_length


def _cost_in_segments(query_length: Any) -> Any:
    """The same of a segment, in tiles: longer rows cost little there, but all are padded to the longest row, and to the
    longest context."""
    return 46 + 12 * query_length


class LoopedRows:
    """Some rows of a packed batch, for all layers of one forward."""

    def __init__(self, rows: Sequence[Row], first_token: NDArray[np.int64]) -> None:
        """`first_token`: `[rows]`, packed places; rows in the batch's order."""
        pieces = [piece for row, token in zip(rows, first_token.tolist(), strict=True) for piece in _pieces(row, token)]
        slots, contexts, lengths, first_tokens = np.array(pieces, dtype=np.int64).T
        positions = (contexts + lengths) * lengths  # that the tokens look back at
        self._by_one_thread = int(positions.sum()) <= POSITIONS_OF_ONE_THREAD
        most_threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # made at run time
        num_threads = min(torch.get_num_threads(), most_threads)
        numba.set_num_threads(num_threads)
        order = dealt(positions, 1 if self._by_one_thread else num_threads)
        self._pieces = (slots[order], contexts[order], lengths[order], first_tokens[order])

    def attend(self, query: Floats, keys: Floats, values: Floats, scaling: float, output: Floats) -> None:
        """Of these rows' tokens.

        Args:
            query: `[T, heads, key_dim]`, of the whole batch.
            keys, values: `[slots, kv_heads, capacity, ...]`, one layer of the cache; these tokens' own are in it.
            output: `[T, heads, value_dim]`, into which it is written, at the places that the tokens have in the batch.
        """
        attend = _loop(query.dtype, keys.shape[-1], values.shape[-1], not self._by_one_thread)
        attend(query, keys, values, *self._pieces, scaling, output)


def _pieces(row: Row, first_token: int) -> Iterator[tuple[int, int, int, int]]:
    """Slot, context, tokens and first packed place of each: like rows, of which each continues the one before."""
    for start in range(0, row.query_length, PIECE_TOKENS):
        num_tokens = min(PIECE_TOKENS, row.query_length - start)
        yield row.slot, row.context_length + start, num_tokens, first_token + start


def dealt(work: NDArray[np.int64], num_threads: int) -> NDArray[np.intp]:
    """An order `[n]` in which equal shares, one after the other, have about as much work `[n]`: threads take those."""
    if num_threads == 1:
        return np.arange(len(work))
    turn, place = np.divmod(np.arange(len(work)), num_threads)
    # forth and back, the most work first; forth at last, because the first shares may be longer by one
    forth = (turn[-1] - turn) % 2 == 0
    thread = np.where(forth, place, num_threads - 1 - place)
    return (-work).argsort(kind="stable")[thread.argsort(kind="stable")]


@functools.cache
def _loop(dtype: np.dtype[Any], key_dim: int, value_dim: int, by_several: bool) -> Callable[..., None]:
    """The loop for heads of this size: one that knows the size when it is compiled is twice as fast."""

    def attend(
        query: Any,
        keys: Any,
        values: Any,
        slots: Any,
        contexts: Any,
        lengths: Any,
        first_tokens: Any,
        scaling: Any,
        output: Any,
    ) -> None:
        """Each part is a piece of a row, and all query heads that share a key-value head, or three of them."""
        kv_heads = keys.shape[1]
        sharing = query.shape[1] // kv_heads
        # `by_several` must be read here: numba keeps what it compiled by what a function reads, not by its options
        divided = by_several and len(slots) * kv_heads < _FEWEST_PARTS
        most_heads = _QUERIES_AT_A_TIME if divided else sharing
        parts_per_kv_head = (sharing - 1) // most_heads + 1
        num_parts = len(slots) * kv_heads * parts_per_kv_head
        for part in numba.prange(num_parts):
            place, within = part // parts_per_kv_head, part % parts_per_kv_head * most_heads
            piece, kv_head = place // kv_heads, place % kv_heads
            next_place = min(part + 1, num_parts - 1) // parts_per_kv_head
            next_piece = next_place // kv_heads
            _attend_part(
                query, keys[slots[piece], kv_head], values[slots[piece], kv_head], contexts[piece], lengths[piece],
                first_tokens[piece], scaling, kv_head * sharing + within, min(most_heads, sharing - within), output,
                keys[slots[next_piece], next_place % kv_heads], contexts[next_piece] + lengths[next_piece],
                key_dim, value_dim,
            )  # fmt: skip

    signature = _SIGNATURE.format(floats=dtype.name)
    return compiled(signature=signature, parallel=by_several, fastmath=_FAST)(attend)


@compiled(fastmath=_FAST, inline="always")
def _attend_part(
    query: Any,
    keys: Any,
    values: Any,
    context: int,
    length: int,
    first_token: int,
    scaling: Any,
    head: int,
    heads: int,
    output: Any,
    next_keys: Any,
    num_next_keys: int,
    key_dim: int,
    value_dim: int,
) -> None:
    """A piece's query heads `head` to `head + heads - 1`, over their keys and values `[capacity, ...]`.

    They are `m` queries, token by token, and some that are nobody's, so that they can be taken three at a time. While
    they are scored the values are fetched, and while these are summed up the first keys of the next part.
    """
    num_queries, total = length * heads, context + length
    num_with_padding = num_queries + -num_queries % _QUERIES_AT_A_TIME
    queries = np.zeros((num_with_padding, key_dim), dtype=np.float32)
    for i in range(num_queries):
        one = query[first_token + i // heads, head + i % heads]
        for d in range(key_dim):
            queries[i, d] = widened(one[d]) * scaling
    weights = np.empty((num_with_padding, total), dtype=np.float32)
    _score(queries, keys, weights, values, key_dim, value_dim)
    for i in range(num_queries):
        softmax(weights[i], context + i // heads + 1)
    sums = np.zeros((num_with_padding, value_dim), dtype=np.float32)
    _sum(weights, values, sums, next_keys, min(total, num_next_keys), key_dim, value_dim)
    for i in range(num_queries):
        one = output[first_token + i // heads, head + i % heads]
        for d in range(value_dim):
            one[d] = narrowed(sums[i, d], output)


@compiled(fastmath=_FAST, inline="always")
def _score(queries: Any, keys: Any, scores: Any, values: Any, key_dim: int, value_dim: int) -> None:
    """`[m, key_dim]` times the first keys `[n, key_dim]`, into `[m, n]`; fetches as many values.

    Three queries and four positions at a time, as in `_sum`.
    """
    num_queries, total = scores.shape
    in_fours = total - total % 4
    for i in range(0, num_queries, _QUERIES_AT_A_TIME):
        query0, query1, query2 = queries[i], queries[i + 1], queries[i + 2]
        scores0, scores1, scores2 = scores[i], scores[i + 1], scores[i + 2]
        for t in range(0, in_fours, 4):
            if i == 0:
                prefetch(values, t * value_dim, 4 * value_dim)
            key0, key1, key2, key3 = keys[t], keys[t + 1], keys[t + 2], keys[t + 3]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = np.float32(0)
            for d in range(key_dim):
                k0, k1, k2, k3 = widened(key0[d]), widened(key1[d]), widened(key2[d]), widened(key3[d])
                a, b, c = query0[d], query1[d], query2[d]
                a0, a1, a2, a3 = a0 + a * k0, a1 + a * k1, a2 + a * k2, a3 + a * k3
                b0, b1, b2, b3 = b0 + b * k0, b1 + b * k1, b2 + b * k2, b3 + b * k3
                c0, c1, c2, c3 = c0 + c * k0, c1 + c * k1, c2 + c * k2, c3 + c * k3
            scores0[t], scores0[t + 1], scores0[t + 2], scores0[t + 3] = a0, a1, a2, a3
            scores1[t], scores1[t + 1], scores1[t + 2], scores1[t + 3] = b0, b1, b2, b3
            scores2[t], scores2[t + 1], scores2[t + 2], scores2[t + 3] = c0, c1, c2, c3
    for t in range(in_fours, total):
        for i in range(num_queries):
            score = np.float32(0)
            for d in range(key_dim):
                score += queries[i, d] * widened(keys[t, d])
            scores[i, t] = score


@compiled(fastmath=_FAST)
def softmax(weights: Any, visible: int) -> None:
    """The softmax of the first `visible` ones; the others are nothing."""
    largest = weights[0]
    for t in range(1, visible):
        largest = max(largest, weights[t])
    normalizer = np.float32(0)
    for t in range(visible):
        weights[t] = exponential(weights[t] - largest)
        normalizer += weights[t]
    for t in range(visible):
        weights[t] /= normalizer
    for t in range(visible, len(weights)):
        weights[t] = 0


@compiled(fastmath=_FAST, inline="always")
def _sum(
    weights: Any, values: Any, sums: Any, next_keys: Any, num_next_keys: int, key_dim: int, value_dim: int
) -> None:
    """Adds `[m, n]` times the first values `[n, value_dim]` to `[m, value_dim]`; fetches so many of the next keys."""
    num_queries, total = weights.shape
    in_fours = total - total % 4
    for i in range(0, num_queries, _QUERIES_AT_A_TIME):
        weights0, weights1, weights2 = weights[i], weights[i + 1], weights[i + 2]
        sums0, sums1, sums2 = sums[i], sums[i + 1], sums[i + 2]
        for t in range(0, in_fours, 4):
            if i == 0 and t < num_next_keys:
                prefetch(next_keys, t * key_dim, 4 * key_dim)
            value0, value1, value2, value3 = values[t], values[t + 1], values[t + 2], values[t + 3]
            a0, a1, a2, a3 = weights0[t], weights0[t + 1], weights0[t + 2], weights0[t + 3]
            b0, b1, b2, b3 = weights1[t], weights1[t + 1], weights1[t + 2], weights1[t + 3]
            c0, c1, c2, c3 = weights2[t], weights2[t + 1], weights2[t + 2], weights2[t + 3]
            for d in range(value_dim):
                v0, v1, v2, v3 = widened(value0[d]), widened(value1[d]), widened(value2[d]), widened(value3[d])
                sums0[d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                sums1[d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
                sums2[d] += c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3
    for t in range(in_fours, total):
        for i in range(num_queries):
            for d in range(value_dim):
                sums[i, d] += weights[i, t] * widened(values[t, d])

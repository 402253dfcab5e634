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
from adaptive_verification.forward.row import Row

MOST_TOKENS_BESIDE_TILES = 8
"""In tiles of bfloat16 rows with more tokens are attended to faster by matrix products."""
PIECE_TOKENS = 16
"""Longer pieces compute more that is hidden, shorter ones read keys and values more often."""
POSITIONS_OF_ONE_THREAD = 800
"""Up to so many that all tokens together look back at, one thread does it: while numba's other threads work torch's
fall asleep, and its next operation must wake them."""
_FEWEST_PARTS = 8
"""With fewer pieces times key-value heads, a group's query heads are divided among the threads, too."""
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
    """Nanoseconds for each position that a row looks back at, one layer of the default target (2 cores with AMX)."""
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
        """Each part is a piece of a row and some query heads that share a key-value head."""
        kv_heads = keys.shape[1]
        # `by_several` must be read here: numba keeps what it compiled by what a function reads, not by its options
        divided = by_several and len(slots) * kv_heads < _FEWEST_PARTS
        heads_per_part = 1 if divided else query.shape[1] // kv_heads
        parts_per_piece = query.shape[1] // heads_per_part
        for part in numba.prange(len(slots) * parts_per_piece):
            piece, head = part // parts_per_piece, part % parts_per_piece * heads_per_part
            _attend_part(
                query, keys, values, slots[piece], contexts[piece], lengths[piece], first_tokens[piece], scaling, head,
                heads_per_part, output, key_dim, value_dim,
            )  # fmt: skip

    signature = _SIGNATURE.format(floats=dtype.name)
    return compiled(signature=signature, parallel=by_several, fastmath=_FAST)(attend)


@compiled(fastmath=_FAST, inline="always")
def _attend_part(
    query: Any,
    keys: Any,
    values: Any,
    slot: int,
    context: int,
    length: int,
    first_token: int,
    scaling: Any,
    head: int,
    heads: int,
    output: Any,
    key_dim: int,
    value_dim: int,
) -> None:
    """A piece's query heads `head` to `head + heads - 1`, which share a key-value head: `m` queries, token by token."""
    kv_head = head // (query.shape[1] // keys.shape[1])
    num_queries = length * heads
    queries = np.empty((num_queries, key_dim), dtype=np.float32)
    for i in range(num_queries):
        one = query[first_token + i // heads, head + i % heads]
        for d in range(key_dim):
            queries[i, d] = widened(one[d]) * scaling
    weights = np.empty((num_queries, context + length), dtype=np.float32)
    _score(queries, keys[slot, kv_head], weights, key_dim)
    for i in range(num_queries):
        softmax(weights[i], context + i // heads + 1)
    sums = np.zeros((num_queries, value_dim), dtype=np.float32)
    _sum(weights, values[slot, kv_head], sums, value_dim)
    for i in range(num_queries):
        one = output[first_token + i // heads, head + i % heads]
        for d in range(value_dim):
            one[d] = narrowed(sums[i, d], output)


@compiled(fastmath=_FAST, inline="always")
def _score(queries: Any, keys: Any, scores: Any, key_dim: int) -> None:
    """`[m, key_dim]` times the first keys `[n, key_dim]`, into `[m, n]`.

    Four positions at a time, so that a query is loaded once for all of them; as in `_sum`.
    """
    num_queries, total = scores.shape
    in_fours = total - total % 4
    four = np.empty((4, key_dim), dtype=np.float32)
    key0, key1, key2, key3 = four[0], four[1], four[2], four[3]
    for t in range(0, in_fours, 4):
        _widen(keys, t, four, key_dim)
        for i in range(num_queries):
            one = queries[i]
            score0 = score1 = score2 = score3 = np.float32(0)
            for d in range(key_dim):
                score0 += one[d] * key0[d]
                score1 += one[d] * key1[d]
                score2 += one[d] * key2[d]
                score3 += one[d] * key3[d]
            scores[i, t], scores[i, t + 1], scores[i, t + 2], scores[i, t + 3] = score0, score1, score2, score3
    for t in range(in_fours, total):
        for i in range(num_queries):
            score0 = np.float32(0)
            for d in range(key_dim):
                score0 += queries[i, d] * widened(keys[t, d])
            scores[i, t] = score0


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
def _sum(weights: Any, values: Any, sums: Any, value_dim: int) -> None:
    """Adds `[m, n]` times the first values `[n, value_dim]` to `[m, value_dim]`."""
    num_queries, total = weights.shape
    in_fours = total - total % 4
    four = np.empty((4, value_dim), dtype=np.float32)
    value0, value1, value2, value3 = four[0], four[1], four[2], four[3]
    for t in range(0, in_fours, 4):
        _widen(values, t, four, value_dim)
        for i in range(num_queries):
            weight0, weight1, weight2, weight3 = weights[i, t], weights[i, t + 1], weights[i, t + 2], weights[i, t + 3]
            one = sums[i]
            for d in range(value_dim):
                one[d] += weight0 * value0[d] + weight1 * value1[d] + weight2 * value2[d] + weight3 * value3[d]
    for t in range(in_fours, total):
        for i in range(num_queries):
            for d in range(value_dim):
                sums[i, d] += weights[i, t] * widened(values[t, d])


@compiled(inline="always")
def _widen(rows: Any, first: int, four: Any, dim: int) -> None:
    """Rows `first` to `first + 3`, into `[4, dim]`."""
    for row in range(4):
        for d in range(dim):
            four[row, d] = widened(rows[first + row, d])

"""What a decoder layer does between its matrix products, on a CPU: one compiled loop each.

torch takes longer for these dozen operations than for the products of few tokens: each is a call of its own, whose code
and data have left the caches since the last layer, and in bfloat16 most convert to float32 and back. The sum that the
layers add to stays in float32 here, whatever the model's type.

A handful of tokens is left to one thread: it is done before a second one is awake, and torch's threads stay awake for
the products. Knows arrays, nothing of models; attention is done by `looped_rows` and `segments`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.host_floats import Floats, exponential, narrowed, pair, widened, word

MOST_TOKENS_OF_ONE_THREAD = 16

_FAST = {"reassoc", "contract", "nsz", "arcp"}


class Places(NamedTuple):
    """Where the tokens of one forward are."""

    cosines: NDArray[np.float32]
    """`[T, head_dim / 2]`, of the angles by which pairs are turned; as the next."""
    sines: NDArray[np.float32]
    slots: NDArray[np.int64]
    """`[T]`, of the cache; as the next."""
    positions: NDArray[np.int64]


@compiled(fastmath=_FAST, parallel=True)
def normalize(x: NDArray[np.float32], weight: Floats, epsilon: float, normalized: Floats) -> None:
    """`x / rms(x) * weight` of each token, `[T, hidden]` into `[T, hidden]`."""
    if len(x) <= MOST_TOKENS_OF_ONE_THREAD:
        for token in range(len(x)):
            _normalize(x[token], weight, epsilon, normalized[token])
    else:
        for token in numba.prange(len(x)):
            _normalize(x[token], weight, epsilon, normalized[token])


@compiled(fastmath=_FAST)
def _normalize(x: Any, weight: Any, epsilon: float, normalized: Any) -> None:
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    scale = np.float32(1 / np.sqrt(squares / len(x) + epsilon))
    for i in range(len(x)):
        normalized[i] = narrowed(x[i] * scale * widened(weight[i]), normalized)


@compiled(fastmath=_FAST, parallel=True)
def add(x: NDArray[np.float32], update: Floats) -> None:
    """`x += update`, both `[T, hidden]`."""
    if len(x) <= MOST_TOKENS_OF_ONE_THREAD:
        for token in range(len(x)):
            _add(x[token], update[token])
    else:
        for token in numba.prange(len(x)):
            _add(x[token], update[token])


@compiled(fastmath=_FAST)
def _add(x: Any, update: Any) -> None:
    for i in range(len(x)):
        x[i] += widened(update[i])


@compiled(fastmath=_FAST, parallel=True)
def activate(gate_and_up: Floats, activated: Floats) -> None:
    """`silu(gate) * up`, `[T, 2 n]` into `[T, n]`."""
    if len(activated) <= MOST_TOKENS_OF_ONE_THREAD:
        for token in range(len(activated)):
            _activate(gate_and_up[token], activated[token])
    else:
        for token in numba.prange(len(activated)):
            _activate(gate_and_up[token], activated[token])


@compiled(fastmath=_FAST)
def _activate(gate_and_up: Any, activated: Any) -> None:
    width = len(activated)
    for i in range(width):
        gate, up = widened(gate_and_up[i]), widened(gate_and_up[width + i])
        activated[i] = narrowed(gate / (np.float32(1) + exponential(-gate)) * up, activated)


@compiled(fastmath=_FAST, parallel=True)
def rotate_and_cache(
    qkv: NDArray[Any],
    cosines: NDArray[np.float32],
    sines: NDArray[np.float32],
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
    keys: NDArray[Any],
    values: NDArray[Any],
    query: NDArray[Any],
) -> None:
    """Rotates queries and keys, and writes keys and values to the cache.

    Args:
        qkv: `[T, query heads + 2 kv heads, head_dim / 2]` words of a rotary pair each.
        cosines, sines, slots, positions: see `Places`.
        keys, values: `[slots, kv heads, capacity, head_dim / 2]` words likewise.
        query: `[T, query heads, head_dim / 2]` words, written.
    """
    if len(qkv) <= MOST_TOKENS_OF_ONE_THREAD:
        for token in range(len(qkv)):
            _place(qkv[token], cosines[token], sines[token], slots[token], positions[token], keys, values, query[token])
    else:
        for token in numba.prange(len(qkv)):
            _place(qkv[token], cosines[token], sines[token], slots[token], positions[token], keys, values, query[token])


@compiled(fastmath=_FAST)
def _place(qkv: Any, cosines: Any, sines: Any, slot: int, position: int, keys: Any, values: Any, query: Any) -> None:
    query_heads, kv_heads = len(query), keys.shape[1]
    for head in range(query_heads):
        _rotate(qkv[head], cosines, sines, query[head])
    for head in range(kv_heads):
        _rotate(qkv[query_heads + head], cosines, sines, keys[slot, head, position])
        for i in range(values.shape[3]):
            values[slot, head, position, i] = qkv[query_heads + kv_heads + head, i]


@compiled(fastmath=_FAST)
def _rotate(head: Any, cosines: Any, sines: Any, rotated: Any) -> None:
    for i in range(len(cosines)):
        real, imaginary = pair(head[i])
        turned_real = real * cosines[i] - imaginary * sines[i]
        turned_imaginary = real * sines[i] + imaginary * cosines[i]
        rotated[i] = word(turned_real, turned_imaginary, rotated)

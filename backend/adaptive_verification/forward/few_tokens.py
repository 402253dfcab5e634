"""What a decoder layer does between its matrix products, for a handful of tokens on a CPU: one compiled loop each.

With few tokens torch takes longer for these dozen operations than for the products: each is a call of its own, whose
code and data have left the caches since the last layer. The loops run on one thread: they are over before a second one
is awake, and torch's threads stay awake for the products.

A token attends to what the cache holds of its slot up to its own position, so tokens of one row and of many look alike;
where they look back at much, `short_rows` does it with several threads. Knows arrays of float32, nothing of models.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled

MOST_TOKENS = 16
"""With more, torch's operations take no longer."""

Floats = NDArray[np.float32]

_FAST = {"reassoc", "contract", "nsz", "arcp"}


class FewTokens(NamedTuple):
    """The tokens of one forward."""

    hidden: Floats
    """`[T, hidden]`, which the layers add to."""
    rotation: Floats
    """`[T, head_dim / 2, 2]`, cosine and sine."""
    slots: NDArray[np.int64]
    """`[T]`, of the cache; as the next."""
    positions: NDArray[np.int64]


@compiled(fastmath=_FAST)
def normalize(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """`x / rms(x) * weight` of each token, `[T, hidden]`."""
    tokens, width = x.shape
    normalized = np.empty((tokens, width), np.float32)
    for token in range(tokens):
        squares = np.float32(0)
        for i in range(width):
            squares += x[token, i] * x[token, i]
        scale = np.float32(1 / math.sqrt(squares / width + epsilon))
        for i in range(width):
            normalized[token, i] = x[token, i] * scale * weight[i]
    return normalized


@compiled(fastmath=_FAST)
def add(x: Floats, update: Floats) -> None:
    """`x += update`, both `[T, hidden]`."""
    tokens, width = x.shape
    for token in range(tokens):
        for i in range(width):
            x[token, i] += update[token, i]


@compiled(fastmath=_FAST)
def activate(gate_and_up: Floats) -> Floats:
    """`silu(gate) * up`, `[T, 2 n]` -> `[T, n]`."""
    tokens, width = len(gate_and_up), gate_and_up.shape[1] // 2
    activated = np.empty((tokens, width), np.float32)
    for token in range(tokens):
        for i in range(width):
            gate = gate_and_up[token, i]
            activated[token, i] = gate / (np.float32(1) + math.exp(-gate)) * gate_and_up[token, width + i]
    return activated


@compiled(fastmath=_FAST)
def rotate_and_cache(
    qkv: Floats,
    rotation: Floats,
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
    keys: Floats,
    values: Floats,
) -> None:
    """Rotates queries and keys in place, and writes keys and values to the cache.

    Args:
        qkv: `[T, (query heads + 2 kv heads) * head_dim]`, with rotary pairs side by side.
        rotation: `[T, head_dim / 2, 2]`, cosine and sine.
        slots, positions: `[T]`.
        keys, values: `[slots, kv heads, capacity, head_dim]`.
    """
    tokens, (_, kv_heads, _, head_dim) = len(qkv), keys.shape
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    for token in range(tokens):
        slot, position = slots[token], positions[token]
        for head in range(query_heads + kv_heads):
            for i in range(head_dim // 2):
                place = head * head_dim + 2 * i
                cosine, sine = rotation[token, i, 0], rotation[token, i, 1]
                real, imaginary = qkv[token, place], qkv[token, place + 1]
                qkv[token, place] = real * cosine - imaginary * sine
                qkv[token, place + 1] = real * sine + imaginary * cosine
        for head in range(kv_heads):
            for i in range(head_dim):
                keys[slot, head, position, i] = qkv[token, (query_heads + head) * head_dim + i]
                values[slot, head, position, i] = qkv[token, (query_heads + kv_heads + head) * head_dim + i]


@compiled(fastmath=_FAST)
def attend(
    qkv: Floats, slots: NDArray[np.int64], positions: NDArray[np.int64], keys: Floats, values: Floats, scaling: float
) -> Floats:
    """Attends over what is cached, from `rotate_and_cache`'s arguments: `[T, query heads * head_dim]`."""
    tokens, (_, kv_heads, _, head_dim) = len(qkv), keys.shape
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    attended = np.zeros((tokens, query_heads * head_dim), np.float32)
    for token in range(tokens):
        for head in range(query_heads):
            kv_head = head // (query_heads // kv_heads)
            _attend_one(
                qkv[token, head * head_dim : (head + 1) * head_dim],
                keys[slots[token], kv_head, : positions[token] + 1],
                values[slots[token], kv_head, : positions[token] + 1],
                scaling,
                attended[token, head * head_dim : (head + 1) * head_dim],
            )
    return attended


@compiled(fastmath=_FAST)
def _attend_one(query: Any, keys: Any, values: Any, scaling: float, attended: Any) -> None:
    """One query `[head_dim]` over keys and values `[n, head_dim]`, added to `attended` `[head_dim]`."""
    length, head_dim = keys.shape
    weights = np.empty(length, np.float32)
    largest = np.float32(-np.inf)
    for place in range(length):
        score = np.float32(0)
        for i in range(head_dim):
            score += query[i] * keys[place, i]
        weights[place] = score * scaling
        largest = max(largest, weights[place])
    total = np.float32(0)
    for place in range(length):
        weights[place] = math.exp(weights[place] - largest)
        total += weights[place]
    for place in range(length):
        weight = weights[place] / total
        for i in range(head_dim):
            attended[i] += weight * values[place, i]

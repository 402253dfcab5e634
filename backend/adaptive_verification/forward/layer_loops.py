"""What a decoder layer does before and after attention, products included: one compiled call each.

For few tokens in bfloat16, Python between a layer's dozen calls takes as long as a third of its products, and longer in
a server, where other processes have emptied the caches. The numbers are those of the calls one by one, to the bit.
Arrays of bits and of words are those of `host_floats`; products are `streamed_products` of few tokens where the layer
has them, else `called_products`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # numba's own list of names leaves it out
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.between_products import activate, add, normalize, rotate_and_cache
from adaptive_verification.forward.called_products import let_go, multiply, numbers_of
from adaptive_verification.forward.streamed_products import stream

_MOST_STREAMED_ROWS, _STREAMED = 2, 3
"""Places in a layer's weights: with how many rows at most they are streamed, and from where on `stream` takes them."""


@compiled
def project(
    hidden: NDArray[np.float32],
    norm: NDArray[np.uint16],
    epsilon: float,
    normed: NDArray[np.uint16],
    normed_handle: int,
    weights: NDArray[np.intp],
    cosines: NDArray[np.float32],
    sines: NDArray[np.float32],
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
    keys: NDArray[np.uint32],
    values: NDArray[np.uint32],
    query: NDArray[np.uint32],
) -> None:
    """From the hidden states `[T, hidden]` to queries; keys and values go to the cache.

    Args:
        hidden, norm, epsilon, normed: as of `normalize`.
        normed_handle: `normed`, and maybe rows of nobody after it, as torch's product takes it.
        weights: of queries, keys and values, joined; see `linear.weights_for_loops`.
        cosines, sines, slots, positions, keys, values, query: as of `rotate_and_cache`.
    """
    normalize(hidden, norm, epsilon, normed)
    num_tokens, heads, size = query.shape
    num_heads = heads + 2 * keys.shape[1]
    qkv, product = _multiplied(normed, normed_handle, weights, 2 * num_heads * size)
    rotate_and_cache(
        qkv.view(np.uint32).reshape(num_tokens, num_heads, size), cosines, sines, slots, positions, keys, values, query
    )
    _let_go(product)


@compiled
def update(
    hidden: NDArray[np.float32],
    attended: NDArray[np.uint16],
    attended_handle: int,
    output: NDArray[np.intp],
    norm: NDArray[np.uint16],
    epsilon: float,
    normed: NDArray[np.uint16],
    normed_handle: int,
    gate_and_up: NDArray[np.intp],
    activated: NDArray[np.uint16],
    activated_handle: int,
    down: NDArray[np.intp],
) -> None:
    """Adds to the hidden states `[T, hidden]` what attention found, and then the feed-forward block's update.

    Args:
        attended, attended_handle: `[T, heads * head_dim]`, twice the same likewise.
        output, gate_and_up, down: weights likewise.
        norm, epsilon, normed, normed_handle: as of `project`, of the second norm.
        activated, activated_handle: room for the block's inner states, `[T, width]`.
    """
    _multiply_and_add(hidden, attended, attended_handle, output)
    normalize(hidden, norm, epsilon, normed)
    both, product = _multiplied(normed, normed_handle, gate_and_up, 2 * activated.shape[1])
    activate(both, activated)
    _let_go(product)
    _multiply_and_add(hidden, activated, activated_handle, down)


@compiled
def _multiply_and_add(hidden: Any, x: Any, handle: int, weights: Any) -> None:
    added, product = _multiplied(x, handle, weights, hidden.shape[1])
    add(hidden, added)
    _let_go(product)


@compiled
def _multiplied(x: Any, handle: int, weights: Any, num_outputs: int) -> Any:
    """`[T, num_outputs]`, and what to give back after its use with `_let_go`.

    Args:
        x: `[T, in]`.
        handle: of the same numbers, and maybe rows of nobody after them.
        weights: see `linear.weights_for_loops`.
    """
    if len(x) <= weights[_MOST_STREAMED_ROWS]:
        output = np.empty((len(x), num_outputs), dtype=np.uint16)
        stream(x, weights[_STREAMED:], output)
        return output, 0
    product = multiply(handle, weights)
    return carray(numbers_of(product), (len(x), num_outputs), np.uint16), product


@compiled
def _let_go(product: int) -> None:
    if product != 0:
        let_go(product)

"""What a decoder layer does before and after attention, products included: one compiled call each.

For few tokens in bfloat16, Python between a layer's dozen calls takes as long as a third of its products, and longer in
a server, where other processes have emptied the caches. The numbers are those of the calls one by one, to the bit.
Arrays of bits and of words are those of `host_floats`; products are `called_products`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # numba's own list of names leaves it out
from numpy.typing import NDArray

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.between_products import activate, add, normalize, rotate_and_cache
from adaptive_verification.forward.called_products import let_go, multiply, numbers_of


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
        normed_handle: `normed`, and maybe rows of nobody after it, as the product takes it.
        weights: of queries, keys and values, joined; see `PackedWeights.addresses`.
        cosines, sines, slots, positions, keys, values, query: as of `rotate_and_cache`.
    """
    normalize(hidden, norm, epsilon, normed)
    product = multiply(normed_handle, weights)
    num_tokens, heads, size = query.shape
    qkv = carray(numbers_of(product), (num_tokens, heads + 2 * keys.shape[1], size), np.uint32)
    rotate_and_cache(qkv, cosines, sines, slots, positions, keys, values, query)
    let_go(product)


@compiled
def update(
    hidden: NDArray[np.float32],
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
        attended_handle: `[n >= T, heads * head_dim]`.
        output, gate_and_up, down: weights, see `PackedWeights.addresses`.
        norm, epsilon, normed, normed_handle: as of `project`, of the second norm.
        activated, activated_handle: room for the block's inner states, `[T, width]`; twice the same likewise.
    """
    num_tokens, width = activated.shape
    _multiply_and_add(hidden, attended_handle, output)
    normalize(hidden, norm, epsilon, normed)
    product = multiply(normed_handle, gate_and_up)
    activate(carray(numbers_of(product), (num_tokens, 2 * width), np.uint16), activated)
    let_go(product)
    _multiply_and_add(hidden, activated_handle, down)


@compiled
def _multiply_and_add(hidden: Any, x: int, weights: Any) -> None:
    product = multiply(x, weights)
    add(hidden, carray(numbers_of(product), hidden.shape, np.uint16))
    let_go(product)

"""Products of few tokens with bfloat16 weights, for which the weights are read once, from the first to the last.

Few tokens wait for the weights to come from memory. Here each thread reads its share in order and asks for what follows
before it needs it (see `prefetch` for why a processor does not do so by itself). Meanwhile it multiplies what has come,
pairs of neighbours at a time where the processor has an instruction for that (AVX512-BF16).

What comes out for a token has the same bits whatever else is multiplied with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]  # numba's own list of names leaves it out
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.compiled import compiled
from adaptive_verification.forward.addresses import as_pointer
from adaptive_verification.forward.host_floats import as_array, narrowed, widened
from adaptive_verification.forward.prefetch import add_prefetch

_OUTPUTS = 4
"""Of a tile: so many outputs of some tokens are summed up together, in registers."""
_MOST_TILE_TOKENS = 6
"""The sums of 6 x 4 vectors, and what is being multiplied, fit into the 32 registers of AVX-512."""
_SHARES = 48
"""Of the outputs, one after the other. Every thread is given neighbouring ones, and many numbers of threads as many."""
_LANES = 16
"""Of a vector of sums; one of inputs has a pair for each."""
_BYTES = 2
"""Of a bfloat16."""


class StreamedWeights:
    """A layer's weights and bias for `stream`.

    Attributes:
        addresses: `[2]`, of the weights' bits and of the bias's; 0 where there is none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Of a layer for which `can_stream` holds."""
        self._arrays = [as_array(tensor.contiguous()) for tensor in (weight, bias) if tensor is not None]
        addresses = [array.ctypes.data for array in self._arrays]
        self.addresses: NDArray[np.intp] = np.array([*addresses, 0][:2], dtype=np.intp)


def can_stream(weight: Tensor) -> bool:
    """Whether there is a loop for weights `[out, in]` like these."""
    num_outputs, num_inputs = weight.shape
    return weight.dtype == torch.bfloat16 and num_outputs % _OUTPUTS == 0 and num_inputs % (2 * _LANES) == 0


@compiled(parallel=True)
def stream(x: NDArray[np.uint16], weights: Any, output: NDArray[np.uint16]) -> None:
    """`x W^T + bias`, summed up in float32 and rounded once. Arrays are bits of bfloat16.

    Args:
        x: `[T, in]`, row by row.
        weights: `StreamedWeights.addresses`.
        output: `[T, out]`, written.
    """
    num_tiles = output.shape[1] // _OUTPUTS
    sums = np.empty((_SHARES, len(x), _OUTPUTS), dtype=np.float32)
    for share in numba.prange(_SHARES):
        first, end = num_tiles * share // _SHARES, num_tiles * (share + 1) // _SHARES
        _stream_tiles(x, weights[0], weights[1], first, end, sums[share], output)


@compiled
def _stream_tiles(x: Any, weights: int, bias: int, first: int, end: int, sums: Any, output: Any) -> None:
    """The outputs `4 first` to `4 end - 1`; `sums`: room for `[T, 4]`."""
    num_tokens, num_inputs = x.shape
    most_tokens = _even_share(num_tokens)
    biases = carray(as_pointer(bias), (output.shape[1],), np.uint16)
    for tile in range(first, end):
        rows = weights + tile * _OUTPUTS * num_inputs * _BYTES
        for token in range(0, num_tokens, most_tokens):
            num_some = min(most_tokens, num_tokens - token)
            _multiply_tile(num_some, x[token].ctypes.data, rows, num_inputs, sums[token].ctypes.data)
        for token in range(num_tokens):
            for i in range(_OUTPUTS):
                number = tile * _OUTPUTS + i
                added = np.float32(0) if bias == 0 else widened(biases[number])
                output[token, number] = narrowed(sums[token, i] + added, output)


@compiled
def _even_share(num_tokens: int) -> int:
    """Tokens of a tile, so that as few tiles as possible have about as many each."""
    num_tiles = max(1, (num_tokens + _MOST_TILE_TOKENS - 1) // _MOST_TILE_TOKENS)
    return max(1, (num_tokens + num_tiles - 1) // num_tiles)


_FLOAT, _WORD, _SIZE = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_SUMS, _PAIRS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_WORD, _LANES)


class _Bfloat16(ir.Type):
    """LLVM's type of that name, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_ADD_PRODUCTS, _MULTIPLY_AND_ADD = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.fmuladd.v16f32"
_BFLOAT16S = ir.VectorType(_Bfloat16(), 2 * _LANES)


def multiplies_pairs() -> bool:
    """Whether the processor has the instruction that multiplies pairs of bfloat16 and adds both products."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


class _Tile:
    """Writes the code for a tile of so many tokens into a function that is being built."""

    def __init__(self, builder: Any, num_tokens: int) -> None:
        self._builder = builder
        nothing = ir.Constant(_SUMS, [_FLOAT(0.0)] * _LANES)
        self._sums = [[cgutils.alloca_once(builder, _SUMS) for _ in range(_OUTPUTS)] for _ in range(num_tokens)]
        for place in itertools.chain(*self._sums):
            builder.store(nothing, place)

    def multiply(self, x: Any, weights: Any, num_inputs: Any, sums: Any) -> None:
        """The arguments are those of `_multiply_tile`."""
        builder = self._builder
        row_bytes = builder.mul(num_inputs, _SIZE(_BYTES))
        with cgutils.for_range(builder, builder.udiv(num_inputs, _SIZE(2 * _LANES)), intp=_SIZE) as loop:
            place = builder.mul(loop.index, _SIZE(2 * _LANES * _BYTES))
            some_weights = []
            for output in range(_OUTPUTS):
                row = builder.add(weights, builder.mul(row_bytes, _SIZE(output)))
                row_of_next_tile = builder.add(row, builder.mul(row_bytes, _SIZE(_OUTPUTS)))
                add_prefetch(builder, builder.add(row_of_next_tile, place))
                some_weights.append(self._pairs(builder.add(row, place)))
            for token, sums_of_token in enumerate(self._sums):
                row = builder.add(x, builder.mul(row_bytes, _SIZE(token)))
                some_inputs = self._pairs(builder.add(row, place))
                for place_of_sums, pairs in zip(sums_of_token, some_weights, strict=True):
                    builder.store(self._added(builder.load(place_of_sums), some_inputs, pairs), place_of_sums)
        for token, sums_of_token in enumerate(self._sums):
            totals = self._totals([builder.load(place_of_sums) for place_of_sums in sums_of_token])
            where = builder.add(sums, _SIZE(token * _OUTPUTS * 4))
            builder.store(totals, builder.inttoptr(where, totals.type.as_pointer()), align=4)

    def _pairs(self, address: Any) -> Any:
        return self._builder.load(self._builder.inttoptr(address, _PAIRS.as_pointer()), align=_BYTES)

    def _added(self, sums: Any, x: Any, y: Any) -> Any:
        """Sums and, in each lane, both products of two pairs."""
        builder = self._builder
        if multiplies_pairs():
            kind = ir.FunctionType(_SUMS, [_SUMS, _BFLOAT16S, _BFLOAT16S])
            add_products = cgutils.get_or_insert_function(builder.module, kind, _ADD_PRODUCTS)
            return builder.call(add_products, [sums, builder.bitcast(x, _BFLOAT16S), builder.bitcast(y, _BFLOAT16S)])
        kind = ir.FunctionType(_SUMS, [_SUMS] * 3)
        multiply_and_add = cgutils.get_or_insert_function(builder.module, kind, _MULTIPLY_AND_ADD)
        for half in (self._second, self._first):
            sums = builder.call(multiply_and_add, [half(x), half(y), sums])
        return sums

    def _first(self, pairs: Any) -> Any:
        sixteen = ir.Constant(_PAIRS, [_WORD(16)] * _LANES)
        return self._builder.bitcast(self._builder.shl(pairs, sixteen), _SUMS)

    def _second(self, pairs: Any) -> Any:
        upper = ir.Constant(_PAIRS, [_WORD(0xFFFF0000)] * _LANES)
        return self._builder.bitcast(self._builder.and_(pairs, upper), _SUMS)

    def _totals(self, sums: Sequence[Any]) -> Any:
        """A vector of what the lanes of each of four vectors come to, always added in the same order."""
        first, second, third, fourth = sums
        halves = self._folded(first, second, 16), self._folded(third, fourth, 16)
        quarters = self._folded(*halves, 8)
        return self._folded(self._folded(quarters, None, 4), None, 2)

    def _folded(self, vector: Any, other: Any, size: int) -> Any:
        """Of each group of `size` lanes, in one vector or two, the first half plus the second."""
        builder = self._builder
        num_lanes = vector.type.count * (1 if other is None else 2)
        first = [lane for lane in range(num_lanes) if lane % size < size // 2]
        second = [lane + size // 2 for lane in first]
        other = vector if other is None else other
        index = ir.VectorType(_WORD, len(first))
        parts = (
            builder.shuffle_vector(vector, other, ir.Constant(index, [_WORD(lane) for lane in lanes]))
            for lanes in (first, second)
        )
        return builder.fadd(*parts)


def _multiply_tile_of(typing_context: Any, num_tokens: Any, x: Any, weights: Any, num_inputs: Any, sums: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        num_tokens, *others = arguments
        after = builder.append_basic_block("after_tile")
        switch = builder.switch(num_tokens, after)
        for number in range(1, _MOST_TILE_TOKENS + 1):
            block = builder.append_basic_block(f"tile_of_{number}")
            switch.add_case(_SIZE(number), block)
            builder.position_at_end(block)
            _Tile(builder, number).multiply(*others)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), code


_multiply_tile: Any = intrinsic(_multiply_tile_of)
"""`(num_tokens, x, weights, num_inputs, sums)`: 1 to 6 tokens times 4 outputs, for compiled functions. All but numbers
are addresses: of `[num_tokens, num_inputs]` and `[4, num_inputs]`, in bits of bfloat16, and of `[num_tokens, 4]` in
float32, written. The rows of weights after these are fetched meanwhile."""

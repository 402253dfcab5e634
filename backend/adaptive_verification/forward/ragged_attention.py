"""Attention over packed tokens of many sequences, straight from a slot cache.

The packed tokens `[T]` of a batch are those of its rows, end to end. On a CPU, most rows are attended to by
`looped_rows`; all others by `segments`. This module knows nothing of transformers: `transformers_forward` registers
it there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.forward.host_floats import Floats, as_array, as_pairs, is_on_host
from adaptive_verification.forward.looped_rows import LoopedRows, are_looped
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.segments import SegmentedRows


class KVCache:
    """Keys and values of every layer: `[slots, kv_heads, capacity, head_dim]` each, preallocated and zeroed.

    Zeroed, because masked positions are still multiplied by a weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        capacity: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_kv_heads, capacity)
        self.keys = [zeros((*shape, key_dim), dtype, device) for _ in range(num_layers)]
        self.values = [zeros((*shape, value_dim), dtype, device) for _ in range(num_layers)]
        layers = list(zip(self.keys, self.values, strict=True))
        self.arrays = (
            [(as_array(keys), as_array(values)) for keys, values in layers] if is_on_host(self.keys[0]) else []
        )
        """The same memory for compiled loops, where these can work on it: they look at it in every layer."""

    @functools.cached_property
    def words(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """`arrays` as words of two neighbours (`host_floats.as_pairs`), for heads of even sizes."""
        return [(as_pairs(keys), as_pairs(values)) for keys, values in self.arrays]

    def copy_prefix(self, from_slot: int, to_slot: int, start: int, end: int) -> None:
        """Positions `start` to `end` of one slot, into another."""
        for layer in (*self.keys, *self.values):
            layer[to_slot, :, start:end] = layer[from_slot, :, start:end]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system's own zero pages, which take memory only as they are written (`torch.zeros`
    writes)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


class RaggedBatch:
    """Everything about a packed batch that all layers share: positions, where to write, how to attend.

    The packed order is the rows' order. Build one per forward. Its indices are made with numpy: they are short, and
    many little operations cost less there.
    """

    def __init__(self, rows: list[Row], cache: KVCache) -> None:
        device = cache.keys[0].device
        self._cache = cache
        query_lengths = np.array([row.query_length for row in rows])
        first_token = query_lengths.cumsum() - query_lengths  # [rows]
        first_position = np.array([row.context_length for row in rows]) - first_token
        slots = np.array([row.slot for row in rows])
        self.capacity = cache.keys[0].shape[2]
        self.num_tokens = int(query_lengths.sum())
        tokens = np.arange(self.num_tokens)
        self.positions = torch.from_numpy(tokens + first_position.repeat(query_lengths)).to(device)  # [T]
        self.slot_of_token = torch.from_numpy(slots.repeat(query_lengths)).to(device)  # [T]
        self.last_token = torch.from_numpy(first_token + query_lengths - 1).to(device)  # [rows]
        self._rows, self._query_lengths, self._first_token = rows, query_lengths, first_token

    @property
    def is_on_host(self) -> bool:
        """Whether compiled loops can work on the cache."""
        return is_on_host(self._cache.keys[0])

    @functools.cached_property
    def _are_looped(self) -> NDArray[np.bool_]:
        """`[rows]`: by whom they are attended to."""
        if not self.is_on_host:
            return np.zeros(len(self._rows), dtype=bool)
        return are_looped(self._rows, self._cache.keys[0].dtype)

    @functools.cached_property
    def _looped_rows(self) -> LoopedRows | None:
        looped = self._are_looped
        if not looped.any():
            return None
        return LoopedRows([self._rows[i] for i in looped.nonzero()[0]], self._first_token[looped])

    @functools.cached_property
    def _segmented_rows(self) -> tuple[SegmentedRows, Tensor | slice] | None:
        """With the packed places of their tokens."""
        segmented = ~self._are_looped
        if not segmented.any():
            return None
        device, dtype = self.positions.device, self._cache.keys[0].dtype
        own = [self._rows[i] for i in segmented.nonzero()[0]]
        rows = SegmentedRows(own, self._first_token[segmented], dtype, device)
        if segmented.all():
            return rows, slice(self.num_tokens)
        (places,) = segmented.repeat(self._query_lengths).nonzero()
        return rows, torch.from_numpy(places).to(device)

    def cached_words(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The layer's keys and values of all slots as words (`KVCache.words`), of a batch that is on the host."""
        return self._cache.words[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Writes the new keys and values to the cache and attends over it.

        Args:
            query: `[T, heads, key_dim]`.
            key: `[T, kv_heads, key_dim]`.
            value: `[T, kv_heads, value_dim]`.

        Returns:
            `[T, heads, value_dim]`.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self.slot_of_token, :, self.positions] = key
        values[self.slot_of_token, :, self.positions] = value
        if self._looped_rows is None and self._segmented_rows is not None:
            return self._segmented_rows[0].attend(query, keys, values, scaling)
        attended = query.new_empty(len(query), query.shape[1], values.shape[-1])
        self.attend_in_loops(layer, as_array(query), scaling, as_array(attended))
        self.attend_in_segments(layer, query, scaling, attended)
        return attended

    def attend_in_loops(self, layer: int, query: Floats, scaling: float, attended: Floats) -> None:
        """The part of `attend` that compiled loops do, where keys and values are in the cache already.

        Args:
            query: `[T, heads, key_dim]`.
            attended: `[T, heads, value_dim]`, into which it is written.
        """
        if self._looped_rows is not None:
            self._looped_rows.attend(query, *self._cache.arrays[layer], scaling, attended)

    @property
    def has_segmented_rows(self) -> bool:
        """Whether there are rows that are attended to by torch."""
        return self._segmented_rows is not None

    def attend_in_segments(self, layer: int, query: Tensor, scaling: float, attended: Tensor) -> None:
        """The other part of `attend`; the same for torch."""
        if self._segmented_rows is not None:
            rows, places = self._segmented_rows
            attended[places] = rows.attend(query, self._cache.keys[layer], self._cache.values[layer], scaling)

"""Attention over packed tokens of many sequences, straight from a slot cache.

The packed tokens `[T]` of a batch are those of its rows, end to end. On a CPU, many rows of few tokens are attended to
by `short_rows`; all others by `segments`. A handful of tokens that look back at little need neither, where the model is
one that `fused_forward` takes over. This module knows nothing of transformers: `transformers_forward` registers it
there.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from adaptive_verification.forward.between_products import MOST_TOKENS_OF_ONE_THREAD
from adaptive_verification.forward.host_floats import is_on_host
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.segments import SegmentedRows
from adaptive_verification.forward.short_rows import FEWEST_POSITIONS, ShortRows, short_rows


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
    def looks_back_at_little(self) -> bool:
        """Whether attention, too, is left to one thread."""
        return self.num_tokens <= MOST_TOKENS_OF_ONE_THREAD and int(self.positions.sum()) < FEWEST_POSITIONS

    @functools.cached_property
    def _parts(self) -> list[tuple[ShortRows | SegmentedRows, Tensor]]:
        """The rows by how they are attended to, with the packed places of their tokens."""
        rows, query_lengths, first_token = self._rows, self._query_lengths, self._first_token
        device, dtype = self.positions.device, self._cache.keys[0].dtype
        tokens = np.arange(self.num_tokens)
        short = short_rows(rows, dtype, device)
        parts: list[tuple[ShortRows | SegmentedRows, Tensor]] = []
        if short.any():
            few = ShortRows([rows[i] for i in short.nonzero()[0]], first_token[short])
            parts.append((few, torch.from_numpy(tokens[short.repeat(query_lengths)])))
        if not short.all():
            many = SegmentedRows([rows[i] for i in (~short).nonzero()[0]], first_token[~short], dtype, device)
            parts.append((many, torch.from_numpy(tokens[~short.repeat(query_lengths)]).to(device)))
        return parts

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values of all slots."""
        return self._cache.keys[layer], self._cache.values[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Writes the new keys and values to the cache and attends over it.

        Args:
            query: `[T, heads, key_dim]`.
            key: `[T, kv_heads, key_dim]`.
            value: `[T, kv_heads, value_dim]`.

        Returns:
            `[T, heads, value_dim]`.
        """
        keys, values = self.cached(layer)
        keys[self.slot_of_token, :, self.positions] = key
        values[self.slot_of_token, :, self.positions] = value
        return self.attend_cached(layer, query, scaling)

    def attend_cached(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """As `attend`, where keys and values are in the cache already."""
        keys, values = self.cached(layer)
        outputs = [part.attend(query, keys, values, scaling) for part, _ in self._parts]
        if len(outputs) == 1:
            return outputs[0]
        together = query.new_empty(len(query), query.shape[1], values.shape[-1])
        for (_, tokens), output in zip(self._parts, outputs, strict=True):
            together[tokens] = output
        return together

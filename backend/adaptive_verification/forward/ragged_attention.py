"""Attention over packed tokens of many sequences from a slot cache: few calls, little padding, hardly any copy.

The packed tokens `[T]` of a batch are cut into segments, each attended to at once: a run of neighbouring slots, which
is a view of the cache, or a few slots from anywhere, which are copied from it. Its rows are padded to the segment's
longest query and context. `plan_segments` merges rows where the padding costs less than another call would, and takes
the few rows of many tokens (drafts, mostly) out of a run whose other rows would all be padded to them.

Grouped query heads are folded into the query dimension, so keys and values are read once per group. This module knows
nothing of transformers: `transformers_forward` registers it there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_CALL_COST_POSITIONS = 400.0
"""One more call costs about as much as reading so many cached positions (2 cores: some 50 us against 0.12 us each)."""
_QUERY_COST = 0.15
"""What each query of a row adds to the cost of reading its context, relative to the reading."""
_COPY_COST = 0.8
"""What copying a row's context adds, likewise."""
_MOST_QUERIES_BY_PRODUCTS = 12
"""Of a slot and key-value head, in float32 on a CPU: so few are attended to by batched matrix products in three
quarters of the time of `F.scaled_dot_product_attention`, more in the same time or longer."""


_Slots = range | tuple[int, ...]
_Join = Callable[[_Slots, _Slots], _Slots]


@dataclass(frozen=True)
class Row:
    """One sequence's part of a packed batch: `query_length` tokens that continue `context_length` cached ones."""

    slot: int
    context_length: int
    query_length: int


@dataclass(frozen=True)
class Segment:
    """Rows (by index into the batch) that are attended to at once, and the slots that are read for them."""

    slots: _Slots
    """A run of neighbours, some of which may be of no row; or those of the rows, in their order."""
    query_length: int
    total_length: int
    rows: tuple[int, ...]

    @property
    def cost(self) -> float:
        """In cached positions read."""
        copying = _COPY_COST if isinstance(self.slots, tuple) else 0.0
        by_position = 1 + copying + _QUERY_COST * self.query_length
        return _CALL_COST_POSITIONS + len(self.slots) * self.total_length * by_position

    def merged(self, other: Segment, slots: _Slots) -> Segment:
        """The rows of both, from these slots."""
        return Segment(
            slots,
            max(self.query_length, other.query_length),
            max(self.total_length, other.total_length),
            self.rows + other.rows,
        )


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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system's own zero pages, which take memory only as they are written (`torch.zeros`
    writes)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def plan_segments(rows: list[Row]) -> list[Segment]:
    """Cuts the rows into segments, greedily: all along the slots, or those of unusually many tokens apart."""
    along = sorted(range(len(rows)), key=lambda i: rows[i].slot)
    together = _greedy(rows, along, _as_run)
    usual_length = statistics.median_low(row.query_length for row in rows)
    longer = [i for i in along if rows[i].query_length > usual_length]
    if not longer:
        return together
    longer.sort(key=lambda i: rows[i].query_length)
    others = [i for i in along if rows[i].query_length <= usual_length]
    apart = _greedy(rows, others, _as_run) + _greedy(rows, longer, _as_copy)
    return min(together, apart, key=lambda segments: sum(segment.cost for segment in segments))


def _greedy(rows: list[Row], order: list[int], joined: _Join) -> list[Segment]:
    """Each row in this order joins the segment before it, or begins one."""
    segments: list[Segment] = []
    for alone in (_alone(rows, index) for index in order):
        if segments:
            last = segments[-1]
            merged = last.merged(alone, joined(last.slots, alone.slots))
            if merged.cost <= last.cost + alone.cost:
                segments[-1] = merged
                continue
        segments.append(alone)
    return segments


def _as_run(slots: _Slots, further: _Slots) -> range:
    return range(slots[0], further[-1] + 1)


def _as_copy(slots: _Slots, further: _Slots) -> tuple[int, ...]:
    return (*slots, *further)


def _alone(rows: list[Row], index: int) -> Segment:
    row = rows[index]
    return Segment(range(row.slot, row.slot + 1), row.query_length, row.context_length + row.query_length, (index,))


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

        self._segments = [
            _SegmentLayout(segment, rows, first_token, cache.keys[0].dtype, device) for segment in plan_segments(rows)
        ]
        offset = 0
        source = np.empty_like(tokens)
        for segment_layout in self._segments:
            source[segment_layout.tokens] = segment_layout.padded_index + offset
            offset += segment_layout.num_padded
        # where each token's output lies in the segments' padded outputs laid end to end; None: already in order
        in_order = offset == self.num_tokens and np.array_equal(source, tokens)
        self._source = None if in_order else torch.from_numpy(source).to(device)

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
        outputs = [segment.attend(query, keys, values, scaling) for segment in self._segments]
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [padded, heads, value_dim]
        return padded if self._source is None else padded.index_select(0, self._source)


class _SegmentLayout:
    """One segment's slice of the cache, its gather index and its mask."""

    def __init__(
        self, segment: Segment, rows: list[Row], first_token: NDArray[Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        slots, self._total_length = segment.slots, segment.total_length
        is_run = isinstance(slots, range)
        self._run = slice(slots[0], slots[-1] + 1) if is_run else slice(0)
        self._copied = None if is_run else torch.tensor(slots, device=device)
        self._shape = (len(slots), segment.query_length)
        self.num_padded = len(slots) * segment.query_length

        members = [rows[index] for index in segment.rows]
        slot_offset = np.array([row.slot - slots[0] for row in members]) if is_run else np.arange(len(slots))
        query_lengths = np.array([row.query_length for row in members])
        contexts = np.array([row.context_length for row in members])
        local = np.arange(segment.query_length)  # [Q]
        is_real = local < query_lengths[:, None]  # [members, Q]
        padded_index = slot_offset[:, None] * segment.query_length + local
        token_index = first_token[list(segment.rows)][:, None] + local
        self.padded_index = padded_index[is_real]  # [segment's tokens] -> padded place
        self.tokens = token_index[is_real]  # [segment's tokens] -> packed place

        # padded queries, and slots of nobody, repeat the first token: computed and dropped
        gather = np.full(self.num_padded, self.tokens[0])
        gather[self.padded_index] = self.tokens
        in_order = np.array_equal(gather, np.arange(self.num_padded))
        self._gather = None if in_order else torch.from_numpy(gather).to(device)

        last_visible = np.zeros(self._shape, dtype=np.int64)  # pads see position 0
        last_visible[slot_offset] = np.where(is_real, contexts[:, None] + local, 0)
        self._mask: Tensor | None = None  # [slots, Q, total]; None: everything is visible
        if last_visible.min() < segment.total_length - 1:
            visible = torch.from_numpy(last_visible).to(device).unsqueeze(-1)
            hidden = torch.arange(segment.total_length, device=device) > visible
            self._mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        self._folded_mask: Tensor | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """`[T, heads, key_dim]` -> `[padded, heads, value_dim]`."""
        num_slots, query_length = self._shape
        kv_heads = keys.shape[1]
        groups = query.shape[1] // kv_heads
        gathered = query[: self.num_padded] if self._gather is None else query.index_select(0, self._gather)
        folded = (
            gathered.reshape(num_slots, query_length, kv_heads, groups, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(num_slots, kv_heads, query_length * groups, -1)
        )
        seen_keys, seen_values = self._seen(keys), self._seen(values)
        mask = self._mask_for(kv_heads, groups)
        if folded.shape[2] <= _MOST_QUERIES_BY_PRODUCTS and folded.dtype == torch.float32 and not folded.is_cuda:
            output = _attend_by_products(folded, seen_keys, seen_values, mask, scaling)
        else:
            output = F.scaled_dot_product_attention(folded, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        # [slots, kv_heads, Q * groups, value_dim]
        return (
            output.reshape(num_slots, kv_heads, query_length, groups, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(self.num_padded, kv_heads * groups, -1)
        )

    def _seen(self, cached: Tensor) -> Tensor:
        """`[slots, kv_heads, total, ...]` of a layer's keys or values."""
        if self._copied is None:
            return cached[self._run, :, : self._total_length]
        return cached[:, :, : self._total_length].index_select(0, self._copied)

    def _mask_for(self, kv_heads: int, groups: int) -> Tensor | None:
        """`[slots, kv_heads, Q * groups, total]`, made once per forward."""
        if self._folded_mask is None and self._mask is not None:
            num_slots, query_length = self._shape
            mask = self._mask[:, None, :, None].expand(-1, kv_heads, -1, groups, -1)
            self._folded_mask = mask.reshape(num_slots, kv_heads, query_length * groups, self._total_length)
        return self._folded_mask


def _attend_by_products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """What `F.scaled_dot_product_attention` computes, by two batched matrix products and a softmax between them.

    Args:
        queries: `[slots, kv_heads, queries, key_dim]`.
        keys, values: `[slots, kv_heads, total, ...]`, of whole slots.
        mask: `[slots, kv_heads, queries, total]`, added to the scores.
    """
    shape = queries.shape[:2]
    transposed_keys = keys.flatten(0, 1).transpose(1, 2)
    if mask is None:
        bias, is_masked = queries.new_zeros(1), 0
    else:
        bias, is_masked = mask.flatten(0, 1), 1
    scores = torch.baddbmm(bias, queries.flatten(0, 1), transposed_keys, beta=is_masked, alpha=scaling)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).unflatten(0, shape)

"""Attention of any rows by torch: few calls on views of the slot cache, little padding, no copy.

A segment is a run of neighbouring slots and one call of scaled-dot-product attention; its rows are padded to the
segment's longest query and context. `plan_segments` merges rows into a segment where the padding costs less than
another call would. Grouped query heads are folded into the query dimension, so keys and values are read once per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.forward.row import Row

_CALL_COST_POSITIONS = 400.0
"""One more call costs about as much as reading so many cached positions (2 cores: some 100 us against 0.2 us each)."""
_QUERY_COST = 0.1
"""What each query of a row adds to the cost of reading its context, relative to the reading."""


@dataclass(frozen=True)
class Segment:
    """Rows (by index into all that are planned) of the slots `first_slot .. first_slot + num_slots - 1`."""

    first_slot: int
    num_slots: int
    query_length: int
    total_length: int
    rows: tuple[int, ...]


def plan_segments(rows: Sequence[Row]) -> list[Segment]:
    """Cuts the rows into segments, greedily along the slots."""
    segments: list[Segment] = []
    for index in sorted(range(len(rows)), key=lambda i: rows[i].slot):
        row = rows[index]
        alone = Segment(row.slot, 1, row.query_length, row.context_length + row.query_length, (index,))
        if segments:
            last = segments[-1]
            merged = Segment(
                first_slot=last.first_slot,
                num_slots=row.slot - last.first_slot + 1,
                query_length=max(last.query_length, alone.query_length),
                total_length=max(last.total_length, alone.total_length),
                rows=(*last.rows, index),
            )
            if _cost(merged) <= _cost(last) + _cost(alone):
                segments[-1] = merged
                continue
        segments.append(alone)
    return segments


def _cost(segment: Segment) -> float:
    return _CALL_COST_POSITIONS + segment.num_slots * segment.total_length * (1 + _QUERY_COST * segment.query_length)


class SegmentedRows:
    """Some rows of a packed batch, for all layers of one forward."""

    def __init__(
        self, rows: Sequence[Row], first_token: NDArray[Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`first_token`: `[rows]`, packed places; rows in the batch's order."""
        self._segments = [_SegmentLayout(segment, rows, first_token, dtype, device) for segment in plan_segments(rows)]
        tokens = np.concatenate([segment.tokens for segment in self._segments])
        offsets = np.cumsum([0, *(segment.num_padded for segment in self._segments)])
        places = [segment.padded_index + offset for segment, offset in zip(self._segments, offsets, strict=False)]
        source = np.concatenate(places)[tokens.argsort()]
        # where each token's output lies in the segments' padded outputs laid end to end; None: already in order
        in_order = np.array_equal(source, np.arange(offsets[-1]))
        self._source = None if in_order else torch.from_numpy(source).to(device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Of these rows' tokens, in their order.

        Args:
            query: `[T, heads, key_dim]`, of the whole batch.
            keys, values: `[slots, kv_heads, capacity, ...]`, one layer of the cache; these tokens' own are in it.

        Returns:
            `[tokens, heads, value_dim]`.
        """
        outputs = [segment.attend(query, keys, values, scaling) for segment in self._segments]
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [padded, heads, value_dim]
        return padded if self._source is None else padded.index_select(0, self._source)


class _SegmentLayout:
    """One segment's slice of the cache, its gather index and its mask."""

    def __init__(
        self, segment: Segment, rows: Sequence[Row], first_token: NDArray[Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._slots = slice(segment.first_slot, segment.first_slot + segment.num_slots)
        self._shape = (segment.num_slots, segment.query_length)
        self._total_length = segment.total_length
        self.num_padded = segment.num_slots * segment.query_length

        members = [rows[index] for index in segment.rows]
        slot_offset = np.array([row.slot - segment.first_slot for row in members])
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
        output = F.scaled_dot_product_attention(
            folded,
            keys[self._slots, :, : self._total_length],
            values[self._slots, :, : self._total_length],
            attn_mask=self._mask_for(groups),
            scale=scaling,
        )  # [slots, kv_heads, Q * groups, value_dim]
        return (
            output.reshape(num_slots, kv_heads, query_length, groups, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(self.num_padded, kv_heads * groups, -1)
        )

    def _mask_for(self, groups: int) -> Tensor | None:
        """`[slots, 1, Q * groups, total]`, made once per forward."""
        if self._folded_mask is None and self._mask is not None:
            num_slots, query_length = self._shape
            mask = self._mask[:, :, None].expand(-1, -1, groups, -1)
            self._folded_mask = mask.reshape(num_slots, 1, query_length * groups, self._total_length)
        return self._folded_mask

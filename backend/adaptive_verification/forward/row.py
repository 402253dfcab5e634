"""What a packed batch is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One sequence's part of a packed batch: `query_length` tokens that continue `context_length` cached ones."""

    slot: int
    context_length: int
    query_length: int

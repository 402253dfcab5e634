"""Times a model's packed forward over the range of sizes that live steps will have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from adaptive_verification.estimation.cost_model import CostCurve, measure_curve
from adaptive_verification.forward.row import Row

_CONTEXT_TOKENS = 128
"""Cached tokens of each timed row: an ordinary chat turn. Longer contexts show in the live times."""
_MAX_ROWS = 64


class SlotModel(Protocol):
    """What can be timed: a model whose forward takes packed rows of cache slots."""

    num_slots: int
    capacity: int
    device: torch.device

    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor: ...


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    sizes = [1 << i for i in range(largest.bit_length()) if 1 << i < largest]
    return [*sizes, largest]


def time_forward(model: SlotModel, sizes: Sequence[int], *, logits_everywhere: bool) -> CostCurve:
    """Milliseconds of one forward by its number of tokens, spread over at most 64 rows.

    Uses the model's cache as scratch space, so it must not hold anything yet.

    Args:
        logits_everywhere: logits after every token (verification), or after each row's last (drafting).
    """

    def run(num_tokens: int) -> None:
        num_rows = min(num_tokens, model.num_slots, _MAX_ROWS)
        lengths = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
        context = max(0, min(_CONTEXT_TOKENS, model.capacity - max(lengths)))
        rows = [Row(slot, context, length) for slot, length in enumerate(lengths)]
        places = torch.arange(num_tokens, device=model.device) if logits_everywhere else None
        logits = model.forward(torch.zeros(num_tokens, dtype=torch.int64), rows, places)
        logits[:, 0].cpu()  # waits for a GPU

    fitting = [size for size in sizes if size <= model.capacity]
    return measure_curve(run, fitting)

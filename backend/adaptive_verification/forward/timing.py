"""Times a model's packed forward over the range of sizes that live steps will have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from adaptive_verification.estimation.cost_model import CostCurve, measure_curve
from adaptive_verification.forward.row import Row

_MAX_ROWS = 64
_LONG_CONTEXT_TOKENS = 256


class SlotModel(Protocol):
    """What can be timed: a model whose forward takes packed rows of cache slots."""

    num_slots: int
    capacity: int
    device: torch.device

    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor: ...


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, ... and the largest itself; 1 and 2 if it is 1, as a curve has a slope.

    Products are made for multiples of powers of two, so the time rises behind one, not on the way to the next.
    """
    largest = max(largest, 2)
    powers = [1 << i for i in range(largest.bit_length() + 1)]
    between = [3 * power // 2 for power in powers if power >= 8]
    behind = [power + 1 for power in powers if power >= 16]
    return [*sorted(size for size in powers + between + behind if size < largest), largest]


def time_forward(
    model: SlotModel, sizes: Sequence[int], *, logits_everywhere: bool, context_tokens: int = 0
) -> CostCurve:
    """Milliseconds of one forward by its number of tokens, spread over at most 64 rows.

    Uses the model's cache as scratch space, so it must not hold anything yet.

    Args:
        logits_everywhere: logits after every token (verification), or after each row's last (drafting).
        context_tokens: cached tokens of each row.
    """

    def run(num_tokens: int) -> None:
        num_rows = min(num_tokens, model.num_slots, _MAX_ROWS)
        lengths = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
        _run(model, lengths, context_tokens, logits_everywhere)

    return measure_curve(run, [size for size in sizes if size <= model.capacity])


def time_context(model: SlotModel) -> CostCurve:
    """Milliseconds of a verifying forward of as many rows as there may be, up to 64, by their cached tokens in all."""
    num_rows = min(model.num_slots, _MAX_ROWS)
    longest = min(_LONG_CONTEXT_TOKENS, model.capacity - 1)

    def run(num_tokens: int) -> None:
        _run(model, [1] * num_rows, num_tokens // num_rows, logits_everywhere=True)

    return measure_curve(run, [num_rows * (longest // 16), num_rows * longest])


def _run(model: SlotModel, lengths: Sequence[int], context_tokens: int, logits_everywhere: bool) -> None:
    context = max(0, min(context_tokens, model.capacity - max(lengths)))
    rows = [Row(slot, context, length) for slot, length in enumerate(lengths)]
    places = torch.arange(sum(lengths), device=model.device) if logits_everywhere else None
    logits = model.forward(torch.zeros(sum(lengths), dtype=torch.int64), rows, places)
    logits[:, 0].cpu()  # waits for a GPU

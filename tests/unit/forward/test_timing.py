"""What is timed: forwards of the sizes that steps have, with the contexts that are asked for, all within the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaptive_verification.forward.row import Row
from adaptive_verification.forward.timing import sizes_up_to, time_context, time_forward


class NotingModel:
    """Notes the forwards' rows and how many logits they ask for."""

    device = torch.device("cpu")

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.forwards: set[tuple[tuple[Row, ...], int]] = set()

    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor:
        assert len(token_ids) == sum(row.query_length for row in rows)
        assert len({row.slot for row in rows}) == len(rows) <= self.num_slots
        assert all(row.context_length >= 0 for row in rows)
        assert all(row.context_length + row.query_length <= self.capacity for row in rows)
        num_logits = len(rows) if logits_at is None else len(logits_at)
        self.forwards.add((tuple(rows), num_logits))
        return torch.zeros(num_logits, 1)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1, 2]), (3, [1, 2, 3]), (17, [1, 2, 4, 8, 12, 16, 17]), (50, [1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 50])],
)
def test_sizes_are_close_enough_to_show_steps(largest: int, sizes: list[int]) -> None:
    assert sizes_up_to(largest) == sizes


@pytest.mark.parametrize("everywhere", [False, True])
def test_tokens_are_spread_over_the_slots(everywhere: bool) -> None:
    model = NotingModel(num_slots=4, capacity=100)
    curve = time_forward(model, [1, 4, 10, 200], logits_everywhere=everywhere, context_tokens=20)
    assert curve.sizes == (1, 4, 10)
    lengths = {tuple(row.query_length for row in rows): count for rows, count in model.forwards}
    assert lengths == {(1,): 1, (1, 1, 1, 1): 4, (3, 3, 2, 2): 10 if everywhere else 4}
    assert {row.context_length for rows, _ in model.forwards for row in rows} == {20}


@pytest.mark.parametrize(("capacity", "contexts"), [(1000, [16, 256]), (33, [2, 32]), (2, [0, 1])])
def test_contexts_are_timed_with_a_token_a_row_and_fit_the_cache(capacity: int, contexts: list[int]) -> None:
    model = NotingModel(num_slots=8, capacity=capacity)
    assert time_context(model).sizes == tuple(8 * tokens for tokens in contexts)
    assert sorted({row.context_length for rows, _ in model.forwards for row in rows}) == contexts


def test_one_slot_is_enough_for_a_curve() -> None:
    """`cache_slots` may be 1."""
    curve = time_forward(NotingModel(num_slots=1, capacity=100), sizes_up_to(1), logits_everywhere=True)
    assert curve.sizes == (1, 2)

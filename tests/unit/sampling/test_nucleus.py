"""The nucleus by bins, against sorting the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adaptive_verification.sampling.nucleus import nucleus


def by_sorting(scaled: Tensor, top_p: Tensor) -> Tensor:
    values, order = scaled.double().sort(dim=-1, descending=True, stable=True)
    probs = values.softmax(-1)
    kept = probs.cumsum(-1) - probs < top_p.unsqueeze(-1)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(-1, order, kept & (probs > 0))


def nucleus_of(scaled: Tensor, top_p: Tensor) -> Tensor:
    return nucleus(scaled - scaled.amax(-1, keepdim=True), top_p.double())


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
def test_it_is_what_sorting_gives(vocab_size: int, spread: float) -> None:
    scaled = spread * torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    top_p = torch.tensor([1e-6, 0.1, 0.3, 0.5, 0.8, 0.95, 0.999])
    assert torch.equal(nucleus_of(scaled, top_p), by_sorting(scaled, top_p))


def test_of_equal_tokens_it_takes_as_many_as_are_needed() -> None:
    in_nucleus = nucleus_of(torch.zeros(3, 1000), torch.tensor([0.2995, 0.9995, 0.0001]))
    assert in_nucleus.sum(-1).tolist() == [300, 1000, 1]


def test_tokens_that_cannot_come_are_never_in_it() -> None:
    scaled = torch.full((2, 300), -torch.inf)
    scaled[0, 7], scaled[1, ::3] = 3.0, 0.0
    in_nucleus = nucleus_of(scaled, torch.tensor([0.9, 0.9999]))
    assert in_nucleus[0].nonzero().flatten().tolist() == [7]
    assert not in_nucleus[1, torch.arange(300) % 3 > 0].any()
    assert in_nucleus[1].sum() == 100

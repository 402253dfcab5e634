"""Noise, drawing and truncation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from adaptive_verification.sampling import noise
from adaptive_verification.sampling.draw import draw
from adaptive_verification.sampling.truncation import scale, truncate


def dense(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The truncated distribution over the whole vocabulary, `[rows, vocab]`."""
    rows = len(logits)
    temperatures = torch.full((rows,), temperature)
    candidates = truncate(
        scale(logits, temperatures), temperatures, torch.full((rows,), top_k), torch.full((rows,), top_p)
    )
    return candidates.dense(logits.shape[-1])


def of_transformers(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    scores = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("vocab_size", [50, 3000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.9), (0, 0.999), (40, 0.8), (300, 0.95), (0, 0.05), (1, 1)]
)
def test_truncation_equals_transformers(vocab_size: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    expected = of_transformers(logits, temperature, top_k, top_p)
    assert torch.allclose(dense(logits, temperature, top_k, top_p), expected, atol=1e-6, rtol=1e-4)


def test_a_flat_distribution_keeps_its_whole_nucleus() -> None:
    """Far more candidates than the first width: nothing is cut off."""
    logits = torch.zeros(1, 5000)
    kept = dense(logits, 1.0, 0, 0.9)
    assert int((kept > 0).sum()) in (4500, 4501)
    assert kept.sum().item() == pytest.approx(1.0)


def test_temperature_zero_keeps_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert dense(logits, 0.0, 0, 1.0).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert dense(torch.tensor([[1.0, 3.0, 2.0]]), 1e-30, 0, 0.9).tolist() == [[0.0, 1.0, 0.0]]


def test_rows_with_different_settings_do_not_mix() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    temperature, top_k, top_p = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 3, 200]), torch.tensor([1.0, 1.0, 0.99])
    together = truncate(scale(logits, temperature), temperature, top_k, top_p)
    for row in range(3):
        one = slice(row, row + 1)
        alone = truncate(scale(logits[one], temperature[one]), temperature[one], top_k[one], top_p[one])
        support = alone.probs[0] > 0
        width = int(support.sum())
        assert torch.equal(together.ids[row, :width], alone.ids[0, :width])
        assert torch.allclose(together.probs[row, :width], alone.probs[0, :width])
        assert together.probs[row, width:].sum() == 0


@pytest.mark.parametrize("size", [1, 3, 600, 5000])
def test_draw_inverts_the_cumulative_sum(size: int) -> None:
    weights = torch.rand(1, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights[0, ::3] = 0.0
    if size == 1:
        weights[:] = 0.5
    cumulative = weights[0].cumsum(0) / weights.sum()
    grid = torch.arange(2000, dtype=torch.float64) / 2000
    drawn = draw(weights.expand(2000, -1), grid)
    assert torch.equal(drawn, torch.searchsorted(cumulative, grid, right=True))


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.3, 1.0, 1e20]), min_size=1, max_size=8),
    uniform=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]),
    repeats=st.sampled_from([1, 200]),
)
def test_an_index_of_weight_zero_is_never_drawn(weights: list[float], uniform: float, repeats: int) -> None:
    row = torch.tensor([weights * repeats])
    if row.sum() > 0:
        index = draw(row, torch.tensor([uniform], dtype=torch.float64))
        assert row[0, index].item() > 0


def test_noise_depends_on_its_key_only() -> None:
    seeds = torch.arange(50)
    together = noise.uniform(seeds, seeds + 7, 3, noise.ACCEPT)
    alone = torch.cat([noise.uniform(seeds[i : i + 1], seeds[i : i + 1] + 7, 3, noise.ACCEPT) for i in range(50)])
    assert torch.equal(together, alone)


def test_noise_is_uniform_and_uncorrelated_along_every_part_of_its_key() -> None:
    n = 20000
    steps, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    streams = [
        noise.uniform(steps, zeros, 0, noise.DRAFT),
        noise.uniform(zeros, steps, 0, noise.DRAFT),
        noise.uniform(zeros, zeros, steps, noise.DRAFT),
        noise.uniform(zeros, steps, 0, noise.ACCEPT),
        noise.uniform(zeros, steps, 0, noise.FINAL),
        noise.uniform(zeros, steps, 1, noise.DRAFT),
    ]
    for stream in streams:
        assert stream.min() >= 0
        assert stream.max() < 1
        assert stats.kstest(stream.numpy(), "uniform").pvalue > 1e-4
        assert abs(torch.corrcoef(torch.stack([stream[1:], stream[:-1]]))[0, 1]) < 0.03
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams), dtype=torch.float64)
    assert correlations.abs().max() < 0.03

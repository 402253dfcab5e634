"""The parts of compiled loops over logits, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adaptive_verification.sampling import loops, noise


def test_noise_is_the_same_as_everywhere() -> None:
    random = np.random.default_rng(1)
    seeds = random.integers(-(2**63), 2**63, 200)
    positions, offsets = random.integers(0, 2**31, 200), random.integers(0, 17, 200)
    for purpose in (noise.ACCEPT, noise.FINAL):
        seed, position, offset = map(torch.from_numpy, (seeds, positions, offsets))
        expected = noise.uniform(seed, position, offset, purpose)
        keys = zip(seeds, positions, offsets, strict=True)
        assert [loops.uniform(*key, purpose) for key in keys] == expected.tolist()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_the_largest_is_found_wherever_it_is(length: int) -> None:
    values = np.random.default_rng(3).normal(-50, 1, length).astype(np.float32)
    for place in range(length):
        with_largest = values.copy()
        with_largest[place:] = [7.0, *values[place + 1 :]]
        with_largest[:place:3] = math.nan
        assert loops.largest_of(with_largest) == 7.0
        assert loops.most_likely(with_largest) == place
    assert loops.largest_of(np.full(length, math.nan)) == -math.inf
    assert loops.most_likely(np.full(length, -math.inf)) == 0


def test_a_sum_is_of_what_lies_between() -> None:
    weights = np.arange(1000, dtype=np.float32)
    for start, stop in ((0, 1000), (3, 3), (5, 6), (17, 981)):
        assert loops.sum_of(weights, start, stop) == weights[start:stop].sum(dtype=np.float64)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
def test_weights_are_exponentials(temperature: float) -> None:
    logits = np.random.default_rng(2).normal(0, 30, 10_000) * temperature
    logits[:3] = logits.max(), -math.inf, math.nan
    weights = np.empty_like(logits)
    loops.exponentials(logits, np.nanmax(logits), temperature, weights)
    exact = np.exp((logits - np.nanmax(logits)) / temperature)
    assert weights[:3].tolist() == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(weights[3:], exact[3:], rtol=1e-13, atol=1e-300)


def test_a_drawn_token_has_its_weight_as_share_of_the_uniform_numbers() -> None:
    weights = np.zeros(1000)
    weights[[3, 255, 256, 700, 999]] = [1.0, 2.0, 0.5, 4.0, 0.5]
    drawn = [loops.draw_weighted(weights, 8.0, (number + 0.5) / 800) for number in range(800)]
    assert np.bincount(drawn, minlength=1000).tolist() == (100 * weights).tolist()
    assert loops.draw_weighted(weights, 8.0, 0.0) == 3  # not the first, which has no weight
    assert loops.draw_weighted(weights, 8.0, 0.125) == 255  # where one share ends the next begins
    assert loops.draw_weighted(weights, 8.0, 1 - 2.0**-53) == 999
    assert loops.draw_weighted(weights, 8.0 * (1 + 1e-9), 1 - 2.0**-53) == 999  # the sum, rounded up

"""Noise keyed by token, and the argmax with it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from adaptive_verification.sampling import gumbel, noise
from adaptive_verification.sampling.truncation import Candidates, scale, truncate

UINT64 = 2**64


def word_by_definition(seed: int, position: int, offset: int, purpose: int) -> int:
    """Three rounds of splitmix64 over the words of the key, in Python's integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % UINT64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % UINT64
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    word = mix((seed + golden) % UINT64)
    word = mix((word + position * 8 + purpose) % UINT64)
    return mix((word + offset * golden) % UINT64)


def gumbel_by_definition(seed: int, position: int, token: int) -> float:
    def exponential(word: int) -> float:
        return -math.log(((word >> 12) * 2 + 1) * 2.0**-53)

    block_word = word_by_definition(seed, position, token // 64, noise.TOKEN_BLOCK)
    first = exponential(block_word) / 64
    if token % 64 == block_word % 64:
        return -math.log(first)
    return -math.log(first + exponential(word_by_definition(seed, position, token, noise.TOKEN)))


def noise_of_all(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return gumbel.gumbel(seed, position, torch.arange(vocab_size).expand(len(seed), -1))


def by_reference(scaled: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The argmax with the noise of every token."""
    return (scaled + noise_of_all(seed, position, scaled.shape[1])).argmax(-1)


def test_noise_is_what_its_definition_says() -> None:
    keys = [(0, 0), (7, 300), (UINT64 - 1, 12), (1 << 63, 5)]
    seeds = torch.tensor([seed - UINT64 if seed >= 1 << 63 else seed for seed, _ in keys])
    ids = torch.tensor([0, 1, 63, 64, 130, 49151])
    computed = gumbel.gumbel(seeds, torch.tensor([position for _, position in keys]), ids.expand(len(keys), -1))
    for row, (seed, position) in enumerate(keys):
        expected = [gumbel_by_definition(seed, position, token) for token in ids.tolist()]
        assert computed[row].tolist() == pytest.approx(expected, rel=1e-14)


def test_noise_has_the_same_bits_in_any_company() -> None:
    seed, position = torch.arange(7), torch.arange(7) * 3
    together = noise_of_all(seed, position, 1000)
    for row in range(7):
        key = seed[row : row + 1], position[row : row + 1]
        assert torch.equal(noise_of_all(*key, 1000)[0], together[row])
        shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(row))[:333]
        assert torch.equal(gumbel.gumbel(*key, shuffled.unsqueeze(0))[0], together[row, shuffled])


def test_noise_is_gumbel_and_independent_along_every_part_of_its_key() -> None:
    n = 20000
    steps, zero = torch.arange(n), torch.zeros(1, dtype=torch.int64)
    one_id = torch.full((n, 1), 70)
    by_token = noise_of_all(zero, zero, n)[0]
    streams = [
        by_token,
        gumbel.gumbel(steps, torch.zeros_like(steps), one_id)[:, 0],
        gumbel.gumbel(torch.zeros_like(steps), steps, one_id)[:, 0],
        gumbel.gumbel(torch.zeros_like(steps), steps, one_id + 1)[:, 0],  # of the same block
        gumbel.gumbel(torch.zeros_like(steps), steps, one_id + 64)[:, 0],
    ]
    uniforms = [torch.exp(-torch.exp(-stream)) for stream in streams]
    for uniform in uniforms:
        assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-4
        for lag in (1, 2, 63, 64, 65):
            assert abs(torch.corrcoef(torch.stack([uniform[lag:], uniform[:-lag]]))[0, 1]) < 0.03
    correlations = torch.corrcoef(torch.stack(uniforms)) - torch.eye(len(uniforms), dtype=torch.float64)
    assert correlations.abs().max() < 0.03


def test_tokens_of_a_block_are_independent_in_their_tails_too() -> None:
    """The noise is drawn through the block's maximum: two tokens are both large as often as independence says."""
    n = 200_000
    pair = gumbel.gumbel(torch.zeros(n, dtype=torch.int64), torch.arange(n), torch.tensor([3, 40]).expand(n, -1))
    bins = torch.bucketize(torch.exp(-pair.neg().exp()), torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64))
    observed = torch.bincount(bins[:, 0] * 4 + bins[:, 1], minlength=16)
    widths = torch.tensor([0.5, 0.4, 0.09, 0.01], dtype=torch.float64)
    expected = (widths.unsqueeze(1) * widths).flatten() * n
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000, 49152])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0, 200.0])
def test_the_best_token_is_the_argmax_over_all_noise(vocab_size: int, spread: float) -> None:
    rows = 4 if vocab_size == 49152 else 200
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    logits[:, vocab_size // 2 + 1 :: 5] = -torch.inf
    scaled = scale(logits, torch.ones(rows))
    seed, position = torch.arange(rows) * 11, torch.arange(rows) + 5
    assert torch.equal(gumbel.best_token(scaled, seed, position), by_reference(scaled, seed, position))


def test_the_best_token_of_sorted_and_of_float64_logits() -> None:
    scaled = torch.linspace(0, -30, 5000, dtype=torch.float64).expand(50, -1)
    seed, position = torch.arange(50), torch.arange(50)
    assert torch.equal(gumbel.best_token(scaled, seed, position), by_reference(scaled, seed, position))


def test_little_of_a_large_vocabularys_noise_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    word = noise.word

    def counting(*key: torch.Tensor) -> torch.Tensor:
        words = word(*key)  # type: ignore[arg-type]
        computed.append(words.numel())
        return words

    monkeypatch.setattr(noise, "word", counting)
    for spread in (0.0, 1.0, 3.0, 6.0):
        computed.clear()
        logits = torch.randn(8, 49152, generator=torch.Generator().manual_seed(2)) * spread
        gumbel.best_token(scale(logits, torch.ones(8)), torch.arange(8), torch.arange(8))
        assert sum(computed) < 0.07 * logits.numel()


def test_the_best_token_is_distributed_by_the_softmax() -> None:
    n, vocab_size = 40_000, 150
    scaled = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * 1.5
    tokens = gumbel.best_token(scaled.expand(n, -1), torch.arange(n), torch.full((n,), 9))
    observed = torch.bincount(tokens, minlength=vocab_size).double()
    expected = scaled[0].double().softmax(-1) * n
    rare = expected < 20
    observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


def test_the_best_of_a_truncated_distribution_is_the_argmax_over_its_support() -> None:
    rows = 300
    scaled = scale(torch.randn(rows, 500, generator=torch.Generator().manual_seed(4)), torch.ones(rows))
    candidates = truncate(
        scaled, torch.ones(rows), torch.arange(rows) % 40 + 1, torch.full((rows,), 0.9, dtype=torch.float64)
    )
    seed, position = torch.arange(rows), torch.arange(rows)
    place = gumbel.best_candidate(candidates, seed, position)
    tokens = candidates.ids.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    dense = torch.full((rows, 500), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        support = candidates.probs[row] > 0
        dense[row, candidates.ids[row, support]] = candidates.probs[row, support].log()
    assert torch.equal(tokens, by_reference(dense, seed, position))


def test_two_distributions_agree_as_often_as_the_closed_form_says() -> None:
    """Both winners are i exactly when every other arrival is later than i's by max(p_j / p_i, q_j / q_i)."""
    n = 100_000
    generator = torch.Generator().manual_seed(5)
    p = torch.randn(6, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.randn(6, generator=generator, dtype=torch.float64).softmax(-1)
    ids = torch.arange(6).expand(n, -1)
    key = torch.arange(n), torch.full((n,), 3)
    same = gumbel.best_candidate(Candidates(ids, p.expand(n, -1)), *key) == gumbel.best_candidate(
        Candidates(ids, q.expand(n, -1)), *key
    )
    ratios = torch.maximum(p / p.unsqueeze(1), q / q.unsqueeze(1))  # [i, j]
    expected = float((1 / ratios.sum(-1)).sum())
    assert same.double().mean().item() == pytest.approx(expected, abs=5 * math.sqrt(0.25 / n))
    assert expected < float(torch.minimum(p, q).sum()), "rejection accepts more often"

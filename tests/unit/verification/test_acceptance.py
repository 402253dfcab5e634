"""Acceptance over large vocabularies: waves, wide and narrow supports, log-probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from adaptive_verification.contract import COUPLED, REJECTION
from adaptive_verification.sampling.truncation import NARROW_WIDTH, scale, truncate
from adaptive_verification.verification.acceptance import accept
from adaptive_verification.verification.block import Block
from adaptive_verification.verification.target_distribution import TargetDistribution

VOCAB_SIZE = 3000
ROWS, DRAFTS, CANDIDATES = 24, 4, 6


def made_block() -> tuple[torch.Tensor, Block]:
    """Rows of all settings and both methods, 0 to 4 drafts of which many are likely."""
    numbers = torch.Generator().manual_seed(3)
    admitted = torch.arange(ROWS) % (DRAFTS + 1)
    logits = 4 * torch.randn(int((admitted + 1).sum()), VOCAB_SIZE, generator=numbers)
    first = (admitted + 1).cumsum(0) - (admitted + 1)
    position = (first[:, None] + torch.arange(DRAFTS)).clamp(max=len(logits) - 1)
    q_ids = logits[position].topk(CANDIDATES).indices  # [rows, K, C]
    choice = torch.randint(0, 2, (ROWS, DRAFTS, 1), generator=numbers)
    settings = torch.arange(ROWS) % 6
    every_draft = torch.full((ROWS * DRAFTS,), CANDIDATES, dtype=torch.int32)
    return logits, Block(
        sampling=torch.arange(ROWS),
        admitted=admitted,
        drafted_count=torch.full((ROWS,), DRAFTS, dtype=torch.int32),
        candidate_count=every_draft,
        draft_tokens=q_ids.gather(-1, choice).flatten().to(torch.int32),
        candidate_ids=q_ids.flatten().to(torch.int32),
        candidate_probs=torch.full((q_ids.numel(),), 1 / CANDIDATES),
        temperature=torch.tensor([0.0, 1.0, 1.0, 0.7, 1.0, 2.0])[settings],
        top_k=torch.tensor([0, 0, 0, 40, 900, 0], dtype=torch.int32)[settings],
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0, 0.95, 0.99])[settings],
        seed=torch.arange(ROWS),
        acceptance=torch.tensor([REJECTION, COUPLED], dtype=torch.int32)[torch.arange(ROWS) // 6 % 2],
        block=torch.full((ROWS,), 50, dtype=torch.int32),
        wants_log_probs=torch.ones(ROWS, dtype=torch.int32),
    )


def part(logits: torch.Tensor, block: Block, rows: slice) -> tuple[torch.Tensor, Block]:
    """A step in which only these rows ask for tokens."""
    positions = torch.cat(logits.split((block.admitted + 1).tolist())[rows])
    return positions, dataclasses.replace(block, sampling=block.sampling[rows])


def test_waves_of_any_length_decide_the_same() -> None:
    logits, block = made_block()
    whole = accept(logits, block, wave_length=DRAFTS + 1)
    assert 0 < whole.accepted.sum() < block.admitted.sum()
    for length in (1, 2, 3):
        waves = accept(logits, block, wave_length=length)
        assert torch.equal(waves.accepted, whole.accepted)
        assert torch.equal(waves.output_tokens, whole.output_tokens)
        assert torch.equal(waves.log_probs, whole.log_probs)


def test_a_row_is_decided_as_if_it_were_alone() -> None:
    logits, block = made_block()
    together = accept(logits, block)
    outputs = together.output_tokens.split((together.accepted + 1).tolist())
    for row in range(ROWS):
        alone = accept(*part(logits, block, slice(row, row + 1)))
        assert torch.equal(alone.output_tokens, outputs[row])


def test_log_probs_are_those_of_the_untransformed_distribution() -> None:
    logits, block = made_block()
    result = accept(logits, block)
    first = (block.admitted + 1).cumsum(0) - (block.admitted + 1)
    positions = torch.cat(
        [start + torch.arange(count + 1) for start, count in zip(first, result.accepted, strict=True)]
    )
    expected = logits[positions].double().log_softmax(-1).gather(-1, result.output_tokens[:, None]).squeeze(-1)
    assert torch.allclose(result.log_probs.double(), expected, atol=1e-5)


def test_log_probs_are_given_to_the_rows_that_want_them_alone() -> None:
    logits, block = made_block()
    whole = accept(logits, block)
    for wanted in (torch.arange(ROWS) % 3 == 0, torch.zeros(ROWS, dtype=torch.bool)):
        result = accept(logits, dataclasses.replace(block, wants_log_probs=wanted.to(torch.int32)))
        assert torch.equal(result.output_tokens, whole.output_tokens)
        is_wanted = wanted.repeat_interleave(result.accepted + 1)
        assert torch.equal(result.log_probs[is_wanted], whole.log_probs[is_wanted])
        assert result.log_probs[~is_wanted].isnan().all()


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.999}, {"top_k": 1000}, {"top_k": 1000, "top_p": 0.9}, {"temperature": 2.5, "top_p": 0.9}]
)
def test_a_wide_support_is_the_truncations(settings: dict[str, Any]) -> None:
    """Of more than the narrow width: kept over the whole vocabulary, but the same distribution."""
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    temperature = torch.full((2,), float(settings.get("temperature", 1.0)))
    top_k, top_p = torch.full((2,), settings.get("top_k", 0)), torch.full((2,), settings.get("top_p", 1.0))
    expected = truncate(scale(logits, temperature), temperature, top_k, top_p).dense(VOCAB_SIZE)
    assert ((expected > 0).sum(-1) > NARROW_WIDTH).all()
    target = TargetDistribution(logits, temperature, top_k, top_p)
    for token in range(0, VOCAB_SIZE, 7):
        got = target.probability_of(torch.arange(2), torch.full((2,), token))
        assert torch.allclose(got, expected[:, token], rtol=1e-4, atol=1e-9)
        assert ((got > 0) == (expected[:, token] > 0)).all()


@pytest.mark.parametrize("top_k", [0, 3, 500])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_row_of_broken_logits_disturbs_no_other(top_k: int, top_p: float) -> None:
    logits, block = made_block()
    block = dataclasses.replace(block, top_k=torch.full_like(block.top_k, top_k), top_p=torch.full((ROWS,), top_p))
    expected = accept(logits, block).output_tokens
    counts = (block.admitted + 1).tolist()
    broken = logits.clone()
    broken[: counts[0]] = torch.nan
    assert torch.equal(accept(broken, block).output_tokens[counts[0] :], expected[counts[0] :])

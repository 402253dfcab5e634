"""Drafts by the compiled loop, against those that a GPU makes. That sampling from them is lossless, `test_lossless`
proves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptive_verification.drafting import proposal_loop
from adaptive_verification.drafting.proposal import Keys, Proposal, propose
from adaptive_verification.drafting.proposal_loop import MOST_CANDIDATES, propose_by_loop
from adaptive_verification.estimation.features import MAX_LOG_ODDS

VOCAB_SIZE, ROWS = 3000, 36
TOKEN_IDS = 7 * torch.arange(VOCAB_SIZE)


def _logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 4 * torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(5), dtype=dtype)


def _arguments(draft_top_k: int = 64) -> tuple[Any, ...]:
    """Settings of all kinds, one with another."""
    rows = torch.arange(ROWS)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0])[rows % 4]
    top_k = torch.tensor([0, 1, 9, 900], dtype=torch.int32)[rows // 4 % 4]
    top_p = torch.tensor([1.0, 0.9, 0.2])[rows % 3]
    keys = Keys(1000 + rows, 50 + rows, 2, torch.zeros(ROWS, dtype=torch.bool))
    return temperature, top_k, top_p, draft_top_k, keys, TOKEN_IDS


def _distribution(proposal: Proposal) -> torch.Tensor:
    return proposal.q.dense(7 * VOCAB_SIZE)


@pytest.mark.parametrize("draft_top_k", [1, 5, 64, MOST_CANDIDATES])
def test_drafts_are_those_of_the_definition(draft_top_k: int) -> None:
    arguments = _arguments(draft_top_k)
    by_loop, expected = propose_by_loop(_logits(), *arguments), propose(_logits(), *arguments)
    assert torch.equal(by_loop.tokens, expected.tokens)
    torch.testing.assert_close(_distribution(by_loop).double(), _distribution(expected), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(by_loop.log_odds, expected.log_odds, rtol=1e-4, atol=1e-4)
    is_candidate = by_loop.q.probs > 0
    assert is_candidate.gather(-1, is_candidate.int().argsort(descending=True, stable=True)).equal(is_candidate)


def test_greedy_rows_alone_are_narrow() -> None:
    _, *rest = _arguments()
    proposal = propose_by_loop(_logits(), torch.zeros(ROWS), *rest)
    assert proposal.q.ids.shape == (ROWS, 1)
    assert torch.equal(proposal.tokens, TOKEN_IDS[_logits().argmax(-1)])
    assert (proposal.q.probs == 1).all()


def test_of_equal_logits_the_first_are_candidates() -> None:
    ones = torch.ones(1)
    keys = Keys(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, torch.zeros(1).bool())
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
    proposal = propose_by_loop(logits, ones, ones.int() * 4, ones, 4, keys, torch.arange(6))
    assert proposal.q.ids.tolist() == [[1, 3, 5, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_broken_logits_disturbs_no_other(temperature: float) -> None:
    _, *rest = _arguments()
    settings = (torch.full((ROWS,), temperature), *rest)
    broken = _logits()
    broken[3] = torch.nan
    broken[4, 17] = torch.inf
    whole, partly = propose_by_loop(_logits(), *settings), propose_by_loop(broken, *settings)
    others = torch.tensor([row for row in range(ROWS) if row not in (3, 4)])
    for field in ("tokens", "log_odds"):
        assert torch.equal(getattr(whole, field)[others], getattr(partly, field)[others])
    assert partly.tokens[3] in TOKEN_IDS
    assert partly.tokens[4] == TOKEN_IDS[17]
    assert partly.log_odds[4] == MAX_LOG_ODDS
    assert partly.log_odds.isfinite().all()
    assert partly.q.probs.isfinite().all()


def test_compiled_it_does_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = propose_by_loop(_logits(), *_arguments())
    monkeypatch.setattr(proposal_loop, "_propose", proposal_loop._propose.py_func)  # type: ignore[attr-defined]  # a compiled function's own
    written = propose_by_loop(_logits(), *_arguments())
    assert torch.equal(written.tokens, compiled.tokens)
    assert torch.equal(written.q.ids, compiled.q.ids)
    assert torch.equal(written.q.probs, compiled.q.probs)
    torch.testing.assert_close(written.log_odds, compiled.log_odds)


def test_bfloat16_is_read_as_the_numbers_that_it_is() -> None:
    rounded = _logits().bfloat16()
    read, widened = propose_by_loop(rounded, *_arguments()), propose_by_loop(rounded.float(), *_arguments())
    assert torch.equal(read.tokens, widened.tokens)
    assert torch.equal(read.q.ids, widened.q.ids)
    assert torch.equal(read.q.probs, widened.q.probs)
    assert torch.equal(read.log_odds, widened.log_odds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_at_load_is_all_that_serving_needs(dtype: torch.dtype) -> None:
    proposal_loop.warm_up(dtype)
    for rows in (1, 2, ROWS):
        temperature, top_k, top_p, draft_top_k, keys, token_ids = _arguments()
        part = Keys(keys.seed[:rows], keys.block[:rows], keys.depth, keys.coupled[:rows])
        settings = (temperature[:rows], top_k[:rows], top_p[:rows])
        propose_by_loop(_logits().to(dtype)[:rows, :2000], *settings, draft_top_k, part, token_ids[:2000])
    widths = [kinds[1].dtype.bitwidth for kinds in proposal_loop._propose.signatures]  # type: ignore[attr-defined]
    assert widths.count(8 * dtype.itemsize) == 1

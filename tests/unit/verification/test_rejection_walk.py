"""The compiled walk: its parts against their definitions, and the whole against the waves that a GPU computes.

That it is lossless, `test_lossless` proves, of the Python that it is written in.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.verification.test_acceptance import VOCAB_SIZE, made_block, part

from adaptive_verification.contract import REJECTION
from adaptive_verification.errors import ContractError
from adaptive_verification.verification import rejection_walk as walk
from adaptive_verification.verification.acceptance import accept


def test_an_infinite_logit_takes_everything() -> None:
    logits = np.array([1.0, math.inf, 0.0], dtype=np.float32)
    weights = np.empty_like(logits)
    assert walk._weigh(logits, 1.0, 0, 1.0, weights) == 1.0
    assert weights.tolist() == [0.0, 1.0, 0.0]


def _most_likely(weights: NDArray[Any], wanted: float, by_number: bool) -> NDArray[Any]:
    kept, reached = np.zeros_like(weights), 0.0
    for token in sorted(range(len(weights)), key=lambda token: (-weights[token], token)):
        if reached >= wanted or weights[token] == 0:
            break
        kept[token] = weights[token]
        reached += 1.0 if by_number else weights[token]
    return kept


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.25, 0.5, 1.0, 2.0**-9, 2.0**-30]), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from([0.0625, 0.5, 0.75, 0.875, 1.0]),
)
def test_of_equal_weights_the_first_are_kept(values: list[float], number: int, share: float) -> None:
    """Weights whose sums are exact, so that it is certain when enough is reached."""
    weights = np.array([*values, 1.0])
    for wanted, by_number in ((float(number), True), (share * weights.sum(), False)):
        kept = weights.copy()
        walk._keep_most_likely(kept, wanted, by_number)
        assert kept.tolist() == _most_likely(weights, wanted, by_number).tolist()


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.1, 0.95, 0.999999])
def test_the_smallest_set_of_a_large_vocabulary(spread: float, share: float) -> None:
    logits = np.random.default_rng(3).normal(0, spread, 20_000)
    weights = np.exp(logits - logits.max())
    kept = weights.copy()
    walk._keep_most_likely(kept, share * weights.sum(), False)
    assert kept.tolist() == _most_likely(weights, share * weights.sum(), False).tolist()
    kept = weights.copy()
    walk._keep_most_likely(kept, 777.0, True)
    assert kept.tolist() == _most_likely(weights, 777.0, True).tolist()


def test_where_nothing_is_left_of_p_it_stays() -> None:
    weights = np.array([1.0, 1.0])
    assert walk._leave_residual(weights, 2.0, np.array([0, 1, 1]), np.array([2.0, 1.0, 1.0]), 4.0) == 2.0
    assert weights.tolist() == [1.0, 1.0]
    assert walk._leave_residual(weights, 2.0, np.array([0]), np.array([0.5]), 2.0) == 1.5
    assert weights.tolist() == [0.5, 1.0]


def test_the_walk_decides_as_the_waves_do() -> None:
    logits, block = made_block()
    walked, waves = accept(logits, block), accept(logits, block, wave_length=1)
    assert torch.equal(walked.accepted, waves.accepted)
    torch.testing.assert_close(walked.log_probs, _log_probs_of(walked, logits, block.admitted), rtol=1e-5, atol=1e-5)
    # in a narrow nucleus the waves draw in another order of the tokens
    same_order = (block.temperature == 0) | ((block.top_k == 0) & (block.top_p == 1)) | (block.acceptance != REJECTION)
    same = same_order.repeat_interleave(walked.accepted + 1)
    assert torch.equal(walked.output_tokens[same], waves.output_tokens[same])
    assert same.sum() < len(same)


def _log_probs_of(outcome: Any, logits: torch.Tensor, admitted: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the outcome's tokens, from their definition."""
    positions = logits.split((admitted + 1).tolist())
    seen = torch.cat([row[: count + 1] for row, count in zip(positions, outcome.accepted.tolist(), strict=True)])
    return seen.log_softmax(-1).gather(-1, outcome.output_tokens[:, None]).squeeze(-1)


@pytest.mark.parametrize("top_k", [0, 3, 500])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_number_get_some_token(top_k: int, top_p: float, temperature: float) -> None:
    logits, block = made_block()
    rows = len(block.admitted)
    block = dataclasses.replace(
        block,
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        acceptance=torch.full((rows,), REJECTION, dtype=torch.int32),
    )
    outcome = accept(torch.full_like(logits, torch.nan), block)
    assert ((outcome.output_tokens >= 0) & (outcome.output_tokens < VOCAB_SIZE)).all()


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE])
def test_candidates_that_the_target_does_not_have_are_refused(wrong: int) -> None:
    logits, block = made_block()
    ids = block.candidate_ids.clone()
    ids[-1] = wrong
    with pytest.raises(
        ContractError, match=f"CANDIDATE_IDS has {wrong}; a token id of the target is 0 to {VOCAB_SIZE - 1}"
    ):
        accept(logits, dataclasses.replace(block, candidate_ids=ids))


def test_compiled_it_does_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, block = made_block()
    compiled = accept(logits, block)
    monkeypatch.setattr(walk, "_walk", walk._walk.py_func)  # type: ignore[attr-defined]  # a compiled function's own
    written = accept(logits, block)
    assert torch.equal(written.accepted, compiled.accepted)
    assert torch.equal(written.output_tokens, compiled.output_tokens)
    assert torch.equal(written.log_probs, compiled.log_probs)


def test_bfloat16_is_read_as_the_numbers_that_it_is() -> None:
    logits, block = made_block()
    rounded = logits.bfloat16()
    read, widened = accept(rounded, block), accept(rounded.float(), block)
    assert torch.equal(read.accepted, widened.accepted)
    assert torch.equal(read.output_tokens, widened.output_tokens)
    torch.testing.assert_close(read.log_probs, widened.log_probs, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_at_load_is_all_that_serving_needs(dtype: torch.dtype) -> None:
    walk.warm_up(dtype)
    logits, block = made_block()
    logits = logits.to(dtype)
    for rows in (slice(0, 1), slice(0, 6), slice(6, 12), slice(None)):  # of one method, of the other, of both
        accept(*part(logits, block, rows))
    widths = [kinds[0].dtype.bitwidth for kinds in walk._walk.signatures]  # type: ignore[attr-defined]
    assert widths.count(8 * dtype.itemsize) == 1

"""Looked-up drafts are lossless: enumeration over the real stages, with the model's drafts beside them in the batch.

Which rows are looked up changes from branch to branch, as their texts do, and the estimator's counts with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.enumeration import Enumerator
from tests.table_model import random_distributions
from tests.unit.test_lossless import (
    SETTINGS,
    AdmitAtMost,
    Distribution,
    Tokens,
    as_requested,
    assert_distributed_by,
)
from tests.unit.test_lossless_adaptive import CURVES, Chain, constant, model_drafter, real_estimator, sharp_pair

from adaptive_verification.contract import Draft, StepRequest
from adaptive_verification.contract.step import Drafter, Estimator
from adaptive_verification.drafting.lookup_stage import LookupDrafter
from adaptive_verification.estimation.cost_model import VERIFY, CostCurve

REPEATS, NEW = (0, 1, 0), (0, 1)
"""Prompts of which the first is looked up at once, the second when its text repeats something."""


def lookup_drafter(model: Drafter | None, vocab_size: int = 2) -> LookupDrafter:
    return LookupDrafter(model, min_match=1, num_slots=4, capacity=64, idle_seconds=60, vocab_size=vocab_size)


class Counting:
    """Notes how many rows of each step were looked up."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.looked_up_rows: list[int] = []

    def step(self, request: StepRequest) -> Draft:
        draft = self._drafter.step(request)
        self.looked_up_rows.append(int(draft.draft_match_length.count_nonzero()))
        return draft


def enumerate_steps(
    monkeypatch: pytest.MonkeyPatch,
    p: Distribution,
    q: Distribution | None,
    *,
    prompts: list[Tokens],
    steps: list[list[int]],
    new_estimator: Callable[[], Estimator] = real_estimator,
    vocab_size: int = 2,
    **settings: Any,
) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Asserts that the steps (their rows' draft limits) are lossless; returns all the ways they went: rows looked up in
    each step, drafts admitted."""
    ways = set()

    def run() -> tuple[Tokens, ...]:
        model = model_drafter(q, vocab_size) if q is not None else None
        drafter = Counting(lookup_drafter(model, vocab_size))
        chain = Chain(p, drafter, vocab_size, new_estimator(), prompts)
        for draft_limits in steps:
            chain.step(draft_limits, **settings)
        ways.add((tuple(drafter.looked_up_rows), tuple(chain.admitted)))
        return chain.outputs(len(prompts))

    outcomes = Enumerator(monkeypatch).outcomes(run)
    assert_distributed_by(outcomes, as_requested(p, settings), vocab_size, prompts)
    return ways


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_row_without_a_model(monkeypatch: pytest.MonkeyPatch, settings: dict[str, float | int]) -> None:
    p = random_distributions(3, seed=1)
    ways = enumerate_steps(
        monkeypatch,
        p,
        None,
        prompts=[REPEATS],
        steps=[[2], [2]],
        new_estimator=lambda: AdmitAtMost([2]),
        vocab_size=3,
        **settings,
    )
    assert {looked_up[0] for looked_up, _ in ways} == {1}


@pytest.mark.parametrize("seed", [2, 5])
def test_a_row_that_is_looked_up_or_drafted_by_the_model_as_its_text_goes(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    p, q = random_distributions(3, seed), random_distributions(3, seed + 100)
    ways = enumerate_steps(monkeypatch, p, q, prompts=[NEW], steps=[[1], [2]], vocab_size=3)
    assert {looked_up for looked_up, _ in ways} == {(0, 0), (0, 1)}


def test_a_looked_up_row_and_a_models_row_that_compete_for_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = sharp_pair(5)
    curves = {**CURVES, VERIFY: CostCurve((1, 8), (1.0, 3.6))}
    ways = enumerate_steps(
        monkeypatch,
        p,
        q,
        prompts=[REPEATS, NEW],
        steps=[[1, 1], [2, 2]],
        new_estimator=lambda: real_estimator(curves),
    )
    assert {looked_up[0] for looked_up, _ in ways} == {1}
    assert len({admitted for _, admitted in ways}) > 2, "nothing was decided, so nothing is shown"


def test_only_the_looked_up_rows_own_scores_reach_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the model's own among them, its second draft's would decide whether its first, which it depends on, is
    verified: together they pay or do not, beside the looked-up one that always does."""

    def q(prefix: Tokens) -> torch.Tensor:
        if len(prefix) == len(NEW):
            return torch.tensor([0.2, 0.8], dtype=torch.float64)
        return torch.tensor([0.99, 0.01] if prefix[-1] == 0 else [0.5, 0.5], dtype=torch.float64)

    curves = {**CURVES, VERIFY: CostCurve((5, 6, 7, 8), (1.0, 1.05, 1.555, 1.565))}
    enumerate_steps(
        monkeypatch,
        constant(0.5, 0.5),
        q,
        prompts=[REPEATS, NEW],
        steps=[[1, 2]],
        new_estimator=lambda: real_estimator(curves),
    )


def test_choosing_between_lookup_and_model_by_the_models_own_token_biases_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p is even, q = (0.2, 0.8), 0 is looked up, and taken where the model does not draw 1: (0.4, 0.6) comes out."""

    class Peeking:
        def __init__(self) -> None:
            self._model, self._lookup = model_drafter(constant(0.2, 0.8), 2), lookup_drafter(None)

        def step(self, request: StepRequest) -> Draft:
            by_model, looked_up = self._model.step(request), self._lookup.step(request)
            return by_model if by_model.draft_tokens.tolist() == [1] else looked_up

    def run() -> tuple[Tokens, ...]:
        chain = Chain(constant(0.5, 0.5), Peeking(), 2, AdmitAtMost([1]), prompts=[(1, 0, 1)])
        chain.step([1])
        return chain.outputs(1)

    first = torch.zeros(2, dtype=torch.float64)
    for (tokens,), probability in Enumerator(monkeypatch).outcomes(run).items():
        first[tokens[0]] += probability
    assert first.tolist() == pytest.approx([0.4, 0.6], abs=1e-7)

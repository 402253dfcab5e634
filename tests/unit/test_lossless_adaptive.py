"""Adaptive verification is lossless: enumeration over the real estimator, with its budget, fit and history at work.

The estimator sees everything it sees in service: the drafters' log-odds, the labels of the last step, the costs. The
rules that would bias the output are broken here on purpose, one by one, and the same sum shows the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.enumeration import Enumerator
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions
from tests.unit.test_lossless import PROMPTS, Distribution, Tokens, assert_distributed_by
from torch import Tensor

from adaptive_verification.contract import Draft, Estimate, LocalStep, StepRequest
from adaptive_verification.contract.step import Drafter, Estimator
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.estimation.budget import admit, best_budget, survival
from adaptive_verification.estimation.cost_model import DRAFT_EXTEND, DRAFT_PREFILL, VERIFY, CostCurve
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings
from adaptive_verification.verification.stage import VerifierStage

KEY = 17
# So dear that it hangs on the expected survivals which budget is best, and uneven: with a straight line a draft's
# verification would hang on its own survival alone, and even a budget from the block's own scores would be lossless.
CURVES = {
    VERIFY: CostCurve(tuple(range(1, 11)), (1.0, 1.94, 2.36, 3.06, 4.12, 4.9, 6.04, 6.93, 7.12, 7.31)),
    DRAFT_PREFILL: CostCurve((1, 64), (0.01, 0.02)),
    DRAFT_EXTEND: CostCurve((1, 64), (0.01, 0.02)),
}


def real_estimator(curves: Mapping[str, CostCurve] = CURVES) -> EstimatorStage:
    """Fits after every step, so the second step's budget rests on what the first one taught."""
    settings = EstimatorSettings(refit_interval=1, max_draft_tokens=3, exploration_share=0.0)
    estimator = EstimatorStage(settings, evidence_key=KEY, curves=curves)
    estimator.fit.refits = 100  # as after a while: no cold start, whose exploration would admit everything
    return estimator


def sharp_pair(seed: int) -> tuple[Distribution, Distribution]:
    """p and q that are often sure, so that scores differ much from prefix to prefix."""
    return random_distributions(2, seed, sharpness=3.0), random_distributions(2, seed + 100, sharpness=3.0)


def model_drafter(q: Distribution, vocab_size: int) -> CausalDrafter:
    return CausalDrafter(
        TableModel(vocab_size, q),  # type: ignore[arg-type]
        target_vocab_size=vocab_size,
        idle_seconds=60,
        draft_top_k=vocab_size,
        max_catch_up_tokens=100,
    )


class Chain:
    """Fresh stages, the tokens of the rows, and how many drafts were admitted in all."""

    def __init__(
        self,
        p: Distribution,
        drafter: Drafter,
        vocab_size: int,
        estimator: Estimator,
        prompts: Sequence[Tokens] = tuple(PROMPTS),
    ) -> None:
        verifier = VerifierStage(TableModel(vocab_size, p), idle_seconds=60)  # type: ignore[arg-type]
        self._step = LocalStep(drafter, estimator, verifier)
        self._prompts = prompts
        self._tokens = [list(prompt) for prompt in prompts]
        self._confirmed = [0] * len(prompts)
        self._accepted = [-1] * len(prompts)
        self.admitted: list[int] = []

    def step(self, draft_limits: list[int], **settings: Any) -> None:
        """One step of the first rows, all with these settings."""
        rows = [
            RequestRow(
                i,
                self._confirmed[i],
                self._tokens[i][self._confirmed[i] :],
                limit,
                previous_accepted=accepted,
                **settings,
            )
            for i, (limit, accepted) in enumerate(zip(draft_limits, self._accepted, strict=False))
        ]
        result = self._step(step_request(rows, previous_cost=torch.empty(0), evidence_key=[KEY]))
        self.admitted += result.admitted_count.tolist()
        for i, output in enumerate(result.output_tokens.split(result.output_count.tolist())):
            self._confirmed[i] = len(self._tokens[i])
            self._tokens[i] += output.tolist()
            self._accepted[i] = len(output) - 1

    def outputs(self, num_rows: int) -> tuple[Tokens, ...]:
        return tuple(tuple(self._tokens[i][len(self._prompts[i]) :]) for i in range(num_rows))


def assert_adaptive_verification_is_lossless(
    monkeypatch: pytest.MonkeyPatch,
    p: Distribution,
    q: Distribution,
    steps: list[list[int]],
    new_estimator: Callable[[], Estimator] = real_estimator,
) -> set[tuple[int, ...]]:
    """Enumerates the steps (their rows' draft limits); returns all the ways drafts were admitted."""
    admitted: set[tuple[int, ...]] = set()
    num_rows = max(map(len, steps))

    def run() -> tuple[Tokens, ...]:
        chain = Chain(p, model_drafter(q, 2), 2, new_estimator())
        for draft_limits in steps:
            chain.step(draft_limits)
        admitted.add(tuple(chain.admitted))
        return chain.outputs(num_rows)

    assert_distributed_by(Enumerator(monkeypatch).outcomes(run), p, 2)
    return admitted


@pytest.mark.parametrize(("seed", "num_ways"), [(2, 1), (5, 2)])
def test_one_row_whose_second_budget_rests_on_its_first_block(
    monkeypatch: pytest.MonkeyPatch, seed: int, num_ways: int
) -> None:
    """With the first pair only a budget from the block's own scores would decide anything, and bias the output."""
    p, q = sharp_pair(seed)
    admitted = assert_adaptive_verification_is_lossless(monkeypatch, p, q, steps=[[2], [2]])
    assert len(admitted) == num_ways


def test_rows_that_compete_for_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = sharp_pair(5)
    admitted = assert_adaptive_verification_is_lossless(monkeypatch, p, q, steps=[[1], [2, 1]])
    assert len(admitted) > 1, "nothing was decided, so nothing is shown"


def test_three_rows_and_three_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = sharp_pair(6)
    assert_adaptive_verification_is_lossless(monkeypatch, p, q, steps=[[3, 1, 1]])


# --- the rules, broken


class Broken:
    """An estimator whose admitted counts come from a function of the drafts of this block."""

    def __init__(self, admitted_counts: Callable[[list[dict[str, Any]]], list[int]]) -> None:
        self._admitted_counts = admitted_counts

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        per_draft = []
        candidates = draft.candidate_count.tolist()
        for token, log_odds, ids, probs in zip(
            draft.draft_tokens.tolist(),
            draft.draft_log_odds.tolist(),
            draft.candidate_ids.split(candidates),
            draft.candidate_probs.split(candidates),
            strict=True,
        ):
            q_drawn = float(probs[ids == token].sum())
            per_draft.append({"token": token, "log_odds": log_odds, "q_drawn": q_drawn})
        admitted = torch.tensor(self._admitted_counts(per_draft), dtype=torch.int32)
        return Estimate(admitted, draft.drafted_count, torch.zeros(1))


def constant(*probabilities: float) -> Distribution:
    return lambda prefix: torch.tensor(probabilities, dtype=torch.float64)


def first_tokens(
    monkeypatch: pytest.MonkeyPatch, p: Distribution, q: Distribution, estimator: Broken, limits: list[int]
) -> list[Tensor]:
    """The exact distribution of each row's first token."""

    def run() -> tuple[Tokens, ...]:
        chain = Chain(p, model_drafter(q, 2), 2, estimator)
        chain.step(limits)
        return chain.outputs(len(limits))

    distributions = [torch.zeros(2, dtype=torch.float64) for _ in limits]
    for outputs, probability in Enumerator(monkeypatch).outcomes(run).items():
        for row, tokens in enumerate(outputs):
            distributions[row][tokens[0]] += probability
    return distributions


def test_scoring_by_the_drawn_tokens_own_probability_biases_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """p is even, q = (0.2, 0.8); drafts of a q below 0.5 are trimmed: (0.4, 0.6) comes out."""
    trims_the_unlikely = Broken(lambda drafts: [int(drafts[0]["q_drawn"] >= 0.5)])
    (output,) = first_tokens(monkeypatch, constant(0.5, 0.5), constant(0.2, 0.8), trims_the_unlikely, [1])
    assert output.tolist() == pytest.approx([0.4, 0.6], abs=1e-7)


def test_a_budget_from_the_blocks_own_scores_biases_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second draft's score depends on the first draft's token, and decides whether that one is verified."""

    def q(prefix: Tokens) -> Tensor:
        if len(prefix) == len(PROMPTS[0]):
            return torch.tensor([0.2, 0.8], dtype=torch.float64)
        sure = prefix[-1] == 0
        return torch.tensor([0.99, 0.01] if sure else [0.5, 0.5], dtype=torch.float64)

    step_ms = np.array([1.0, 1.7, 1.8])

    def peeking(drafts: list[dict[str, Any]]) -> list[int]:
        acceptance = [1 / (1 + np.exp(1.0 - draft["log_odds"])) for draft in drafts]
        survivals = survival(np.array([acceptance]))
        counts = np.array([len(drafts)])
        return admit(survivals, counts, best_budget(survivals, counts, step_ms, 1.0)).tolist()

    (output,) = first_tokens(monkeypatch, constant(0.5, 0.5), q, Broken(peeking), [2])
    assert abs(output[0].item() - 0.5) > 0.01


def test_ties_that_look_at_token_values_bias_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal drafts and room for one of them: the lower token goes first."""

    def lower_token_first(drafts: list[dict[str, Any]]) -> list[int]:
        first = int(drafts[0]["token"] > drafts[1]["token"])
        return [int(first == row) for row in range(2)]

    outputs = first_tokens(monkeypatch, constant(0.5, 0.5), constant(0.2, 0.8), Broken(lower_token_first), [1, 1])
    assert max(abs(output[0].item() - 0.5) for output in outputs) > 0.01

"""The output distribution equals the target's: proven by enumeration over the real drafter and verifier stages.

Whatever the drafter proposes and whatever part of it is admitted (by a rule that does not look at the tokens), the
tokens of a step are distributed by the target, to rounding in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.enumeration import Enumerator, decide_as_on_a_gpu
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions
from torch import Tensor

from adaptive_verification.contract import Draft, Estimate, LocalStep, StepRequest
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.sampling.truncation import scale, truncate
from adaptive_verification.verification import acceptance, rejection, rejection_walk
from adaptive_verification.verification.stage import VerifierStage

Distribution = Callable[[tuple[int, ...]], Tensor]
Tokens = tuple[int, ...]
PROMPTS: list[Tokens] = [(0, 1), (1,), (1, 0, 0)]


@pytest.fixture(params=["as on a CPU", "as on a GPU"], autouse=True)
def decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of acceptance."""
    if request.param == "as on a GPU":
        decide_as_on_a_gpu(monkeypatch)


class AdmitAtMost:
    """Admits so many drafts of each row."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        admitted = torch.minimum(draft.drafted_count, torch.tensor(self._counts, dtype=torch.int32))
        return Estimate(admitted, draft.drafted_count, torch.zeros(1))


def run_steps(
    p: Distribution,
    q: Distribution,
    vocab_size: int,
    admitted: list[int],
    settings: dict[str, float | int],
    draft_limit: int,
    num_steps: int,
    draft_top_k: int,
) -> tuple[Tokens, ...]:
    """The new tokens of each row after so many steps, from fresh stages."""
    target = TableModel(vocab_size, p)
    step = LocalStep(
        CausalDrafter(
            TableModel(vocab_size, q),  # type: ignore[arg-type]
            target_vocab_size=vocab_size,
            idle_seconds=60,
            draft_top_k=draft_top_k,
            max_catch_up_tokens=100,
        ),
        AdmitAtMost(admitted),
        VerifierStage(target, idle_seconds=60),  # type: ignore[arg-type]
    )
    tokens = [list(prompt) for prompt in PROMPTS[: len(admitted)]]
    confirmed = [0] * len(tokens)
    for _ in range(num_steps):
        rows = [
            RequestRow(i, confirmed[i], tokens[i][confirmed[i] :], draft_limit, **settings)  # type: ignore[arg-type]
            for i in range(len(tokens))
        ]
        result = step(step_request(rows))
        confirmed = [len(row) for row in tokens]
        for row, output in zip(tokens, result.output_tokens.split(result.output_count.tolist()), strict=True):
            row += output.tolist()
    return tuple(tuple(row[len(prompt) :]) for row, prompt in zip(tokens, PROMPTS, strict=False))


def as_requested(distribution: Distribution, settings: dict[str, float | int]) -> Distribution:
    """The distribution that a request with these settings asks for, dense."""

    def transformed(prefix: Tokens) -> Tensor:
        logits = distribution(prefix).log().unsqueeze(0)
        temperature = torch.tensor([float(settings.get("temperature", 1.0))])
        scaled = scale(logits, temperature)
        top_k, top_p = torch.tensor([int(settings.get("top_k", 0))]), torch.tensor([float(settings.get("top_p", 1.0))])
        if temperature > 0 and top_k == 0 and top_p == 1:
            return scaled.softmax(-1)[0]
        candidates = truncate(scaled, temperature, top_k, top_p)
        return candidates.dense(scaled.shape[-1])[0]

    return transformed


def assert_distributed_by(
    outcomes: dict[tuple[Tokens, ...], float],
    target: Distribution,
    vocab_size: int,
    prompts: Sequence[Tokens] = tuple(PROMPTS),
) -> None:
    """Every row's tokens have the target's probabilities: for each prefix, the frequency of each next token."""
    assert sum(outcomes.values()) == pytest.approx(1.0, abs=1e-12)
    for row, prompt in enumerate(prompts[: len(next(iter(outcomes)))]):
        reach: dict[Tokens, float] = defaultdict(float)  # probability that the output begins so and goes on
        follows: dict[Tokens, Tensor] = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.float64))
        for tokens, probability in outcomes.items():
            output = tokens[row]
            for length in range(len(output)):
                reach[output[:length]] += probability
                follows[output[:length]][output[length]] += probability
        # a token that a block happens to reach must be distributed by p given its prefix, whatever ended other blocks
        for prefix, counts in follows.items():
            error = (counts / reach[prefix] - target(prompt + prefix)).abs().max().item()
            assert error < 1e-12, f"row {row}, after {prefix}: off by {error}"


SETTINGS: list[dict[str, float | int]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.7, "top_k": 2, "top_p": 0.9},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("admitted", [[0], [1], [2]], ids=str)
def test_one_row_of_one_step(
    monkeypatch: pytest.MonkeyPatch, admitted: list[int], settings: dict[str, float | int]
) -> None:
    p, q = random_distributions(3, seed=1), random_distributions(3, seed=2)
    outcomes = Enumerator(monkeypatch).outcomes(
        lambda: run_steps(p, q, 3, admitted, settings, draft_limit=2, num_steps=1, draft_top_k=3)
    )
    assert_distributed_by(outcomes, as_requested(p, settings), 3)


def test_three_drafts_of_four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_distributions(4, seed=3), random_distributions(4, seed=4)
    settings: dict[str, float | int] = {"top_k": 2}
    outcomes = Enumerator(monkeypatch).outcomes(
        lambda: run_steps(p, q, 4, [3], settings, draft_limit=3, num_steps=1, draft_top_k=4)
    )
    assert_distributed_by(outcomes, as_requested(p, settings), 4)


def test_a_drafter_that_knows_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_distributions(4, seed=5), random_distributions(4, seed=6)
    outcomes = Enumerator(monkeypatch).outcomes(
        lambda: run_steps(p, q, 4, [2], {}, draft_limit=2, num_steps=1, draft_top_k=2)
    )
    assert_distributed_by(outcomes, p, 4)


def test_two_rows_trimmed_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_distributions(2, seed=7), random_distributions(2, seed=8)
    outcomes = Enumerator(monkeypatch).outcomes(
        lambda: run_steps(p, q, 2, [2, 1], {}, draft_limit=2, num_steps=1, draft_top_k=2)
    )
    assert_distributed_by(outcomes, p, 2)


def test_two_steps_with_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_distributions(2, seed=9), random_distributions(2, seed=10)
    outcomes = Enumerator(monkeypatch).outcomes(
        lambda: run_steps(p, q, 2, [2], {}, draft_limit=2, num_steps=2, draft_top_k=2)
    )
    assert_distributed_by(outcomes, p, 2)


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}], ids=["dense", "sparse"])
def test_the_proof_fails_when_the_final_token_ignores_the_rejection(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float | int]
) -> None:
    p, q = random_distributions(3, seed=1), random_distributions(3, seed=2)
    enumerator = Enumerator(monkeypatch)
    for name in ("residual", "residual_of_sparse"):
        monkeypatch.setattr(f"adaptive_verification.verification.target_distribution.{name}", lambda p, q: p)
    monkeypatch.setattr(rejection_walk, "_leave_residual", lambda weights, total, *q: total)
    outcomes = enumerator.outcomes(lambda: run_steps(p, q, 3, [2], settings, draft_limit=2, num_steps=1, draft_top_k=3))
    with pytest.raises(AssertionError, match="off by"):
        assert_distributed_by(outcomes, p, 3)


def test_the_proof_fails_when_too_much_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = random_distributions(3, seed=1), random_distributions(3, seed=2)
    enumerator = Enumerator(monkeypatch)
    exact = rejection.acceptance_probability
    monkeypatch.setattr(acceptance, "acceptance_probability", lambda p, q: exact(1.1 * p, q))
    monkeypatch.setattr(rejection_walk, "_accepts", lambda p, q, coin: enumerator.accepts(1.1 * p, q, coin))
    outcomes = enumerator.outcomes(lambda: run_steps(p, q, 3, [2], {}, draft_limit=2, num_steps=1, draft_top_k=3))
    with pytest.raises(AssertionError, match="off by"):
        assert_distributed_by(outcomes, p, 3)


def test_what_a_rejection_by_rounding_leaves_is_the_target() -> None:
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    assert torch.equal(rejection.residual(p, p.clone()), p)


def test_a_token_that_was_not_drawn_from_q_is_rejected() -> None:
    zero, half = torch.zeros(1), torch.full((1,), 0.5)
    assert rejection.acceptance_probability(half, zero).item() == 0.0

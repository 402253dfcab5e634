"""The verifier: what it computes, which rows answer, and what it remembers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions

from adaptive_verification.contract import (
    FILL_ONLY,
    STATUS_CONTEXT_FULL,
    STATUS_NOT_CACHED,
    STATUS_OK,
    Draft,
    DraftCost,
    Estimate,
    StepCost,
    StepResult,
)
from adaptive_verification.errors import ContractError
from adaptive_verification.verification.stage import VerifierStage

VOCAB_SIZE = 7
P = random_distributions(VOCAB_SIZE, seed=2)


def greedy(prefix: Sequence[int], length: int) -> list[int]:
    tokens = list(prefix)
    for _ in range(length):
        tokens.append(int(P(tuple(tokens)).argmax()))
    return tokens[len(prefix) :]


def certain_drafts(drafts: Sequence[Sequence[int]], statuses: Sequence[int] | None = None) -> Draft:
    """Drafts that their drafter was sure of."""
    tokens = torch.tensor([token for row in drafts for token in row], dtype=torch.int32)
    return Draft(
        drafted_count=torch.tensor([len(row) for row in drafts], dtype=torch.int32),
        draft_status=torch.tensor(statuses or [STATUS_OK] * len(drafts), dtype=torch.int32),
        draft_match_length=torch.zeros(len(drafts), dtype=torch.int32),
        draft_tokens=tokens,
        draft_log_odds=torch.zeros(len(tokens)),
        draft_features=torch.empty(0),
        candidate_count=torch.ones(len(tokens), dtype=torch.int32),
        candidate_ids=tokens,
        candidate_probs=torch.ones(len(tokens)),
        draft_cost=DraftCost(1, 2, 3, 4, 5).to_tensor(),
    ).validate()


class Verifier:
    """A verifier over a table, with the model in sight."""

    def __init__(self, capacity: int = 64, prefix_caching: bool = True) -> None:
        self.model = TableModel(VOCAB_SIZE, P, num_slots=8, capacity=capacity)
        self.stage = VerifierStage(self.model, idle_seconds=60, prefix_caching=prefix_caching)  # type: ignore[arg-type]

    def step(
        self,
        rows: Sequence[RequestRow],
        drafts: Sequence[Sequence[int]],
        admitted: Sequence[int] | None = None,
        statuses: Sequence[int] | None = None,
    ) -> StepResult:
        counts = [len(row) for row in drafts] if admitted is None else admitted
        estimate = Estimate(
            admitted_count=torch.tensor(counts, dtype=torch.int32),
            next_draft_limit=torch.full((len(rows),), 9, dtype=torch.int32),
            estimate_cost=torch.tensor([0.5]),
        )
        return self.stage.step(step_request(rows), certain_drafts(drafts, statuses), estimate).validate()


def outputs(result: StepResult) -> list[list[int]]:
    return [tokens.tolist() for tokens in result.output_tokens.split(result.output_count.tolist())]


@pytest.fixture
def verifier() -> Verifier:
    return Verifier()


def test_greedy_drafts_are_accepted_up_to_the_first_that_differs(verifier: Verifier) -> None:
    right = greedy([1, 2], 4)
    wrong = [right[0], (right[1] + 1) % VOCAB_SIZE, right[2]]
    rows = [RequestRow(i, 0, [1, 2], draft_limit=3, temperature=0.0) for i in range(3)]
    result = verifier.step(rows, [right[:3], wrong, []])
    assert outputs(result) == [right, right[:2], right[:1]]


def test_a_trimmed_draft_is_as_if_it_had_never_been_made(verifier: Verifier) -> None:
    right = greedy([1, 2], 4)
    row = RequestRow(1, 0, [1, 2], draft_limit=3, temperature=0.0)
    assert outputs(verifier.step([row], [right[:3]], admitted=[1])) == [right[:2]]
    assert verifier.model.num_computed_tokens == 3


def test_accepted_drafts_are_not_computed_again_and_rejected_ones_are_forgotten(verifier: Verifier) -> None:
    right = greedy([1, 2], 8)
    wrong = (right[1] + 1) % VOCAB_SIZE
    first = outputs(verifier.step([RequestRow(1, 0, [1, 2], 3, 0.0)], [[right[0], wrong, 0]]))[0]
    computed = verifier.model.num_computed_tokens
    second = outputs(verifier.step([RequestRow(1, 2, first, 3, 0.0)], [right[2:4]]))[0]
    assert first + second == right[:5]
    assert verifier.model.num_computed_tokens - computed == 1 + 2


def test_log_probs_are_the_targets_own(verifier: Verifier) -> None:
    right = greedy([1, 2], 2)
    row = RequestRow(1, 0, [1, 2], 1, temperature=0.0, wants_log_probs=True)
    result = verifier.step([row, RequestRow(2, 0, [3], temperature=0.0)], [right[:1], []])
    expected = [float(P((1, 2))[right[0]].log()), float(P((1, 2, right[0]))[right[1]].log())]
    assert result.log_probs[:2].tolist() == pytest.approx(expected, abs=1e-5)
    assert result.log_probs[2:].isnan().tolist() == [True]


def test_a_sampled_token_depends_on_its_row_alone(verifier: Verifier) -> None:
    rows = [RequestRow(i, 0, [i % 7, 2], temperature=1.0, seed=100 + i) for i in range(6)]
    together = outputs(verifier.step(rows, [[]] * 6))
    alone = [outputs(Verifier().step([row], [[]]))[0] for row in rows]
    assert together == alone


def test_rows_that_fill_answer_nothing_and_save_later_work(verifier: Verifier) -> None:
    filled = verifier.step([RequestRow(1, 0, [1, 2, 3], FILL_ONLY)], [[]])
    assert filled.output_count.tolist() == [0]
    result = verifier.step([RequestRow(1, 3, [4], temperature=0.0)], [[]])
    assert outputs(result) == [greedy([1, 2, 3, 4], 1)]
    assert verifier.model.num_computed_tokens == 4


def test_what_another_sequence_computed_is_not_computed_again(verifier: Verifier) -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    verifier.step([RequestRow(1, 0, [*prompt, 0], temperature=0.0)], [[]])
    assert verifier.model.num_computed_tokens == 7
    right = greedy([*prompt, 1], 3)
    result = verifier.step([RequestRow(2, 0, [*prompt, 1], draft_limit=2, temperature=0.0)], [right[:2]])
    assert outputs(result) == [right]
    cost = StepCost.from_tensor(result.step_cost)
    assert cost is not None
    assert (cost.reused_tokens, cost.verify_tokens) == (6, 3)
    assert verifier.model.num_computed_tokens == 7 + 3
    result = verifier.step([RequestRow(3, 0, prompt, temperature=0.0)], [[]])
    assert outputs(result) == [greedy(prompt, 1)], "its last token is computed for the logits after it"
    assert verifier.model.num_computed_tokens == 7 + 3 + 1


def test_without_prefix_caching_every_sequence_is_computed() -> None:
    verifier = Verifier(prefix_caching=False)
    for sequence_id in (1, 2):
        row = RequestRow(sequence_id, 0, [1, 2, 3, 4, 5, 6], temperature=0.0)
        assert outputs(verifier.step([row], [[]])) == [greedy([1, 2, 3, 4, 5, 6], 1)]
    assert verifier.model.num_computed_tokens == 12


def test_sequences_that_begin_alike_come_and_go_and_each_is_its_own() -> None:
    rng = random.Random(0)
    verifier = Verifier()
    texts: dict[int, list[int]] = {}
    confirmed: dict[int, int] = {}
    for step in range(60):
        if len(texts) < 12:  # more than there are slots
            tokens = [1, 2, 3, 4, 5, 6, 0, 1][: rng.randint(3, 8)]
            texts[step] = tokens + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
            confirmed[step] = 0
        chosen = rng.sample(sorted(texts), min(len(texts), 4))
        rows, drafts = [], []
        for sequence_id in chosen:
            text = texts[sequence_id]
            rows.append(RequestRow(sequence_id, confirmed[sequence_id], text[confirmed[sequence_id] :], 3, 0.0))
            right = greedy(text, 3)
            drafts.append([right[0], rng.choice([right[1], 0]), right[2]])
        result = verifier.step(rows, drafts)
        for sequence_id, status, output in zip(chosen, result.status.tolist(), outputs(result), strict=True):
            if status == STATUS_NOT_CACHED:
                confirmed[sequence_id] = 0
                continue
            assert output == greedy(texts[sequence_id], len(output))
            confirmed[sequence_id] = len(texts[sequence_id])
            texts[sequence_id] += output
            if len(texts[sequence_id]) > 24:
                del texts[sequence_id], confirmed[sequence_id]


def test_the_drafters_status_is_passed_on_without_an_output(verifier: Verifier) -> None:
    rows = [RequestRow(1, 0, [1], temperature=0.0), RequestRow(2, 0, [1], temperature=0.0)]
    result = verifier.step(rows, [[], []], statuses=[STATUS_NOT_CACHED, STATUS_OK])
    assert result.status.tolist() == [STATUS_NOT_CACHED, STATUS_OK]
    assert result.output_count.tolist() == [0, 1]


def test_a_full_context_is_told_and_drafts_are_cut_to_the_room_left() -> None:
    verifier = Verifier(capacity=4)
    right = greedy([1, 2], 4)
    result = verifier.step([RequestRow(1, 0, [1, 2], 3, 0.0), RequestRow(2, 0, [1] * 5)], [right[:3], []])
    assert result.status.tolist() == [STATUS_OK, STATUS_CONTEXT_FULL]
    assert result.admitted_count.tolist() == [2, 0]
    assert outputs(result)[0] == right[:3]


def test_a_forward_that_fails_can_be_tried_again(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    row = RequestRow(1, 0, [1, 2], temperature=0.0)
    forward = verifier.model.forward

    def failing(*arguments: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(verifier.model, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        verifier.step([row], [[]])
    monkeypatch.setattr(verifier.model, "forward", forward)
    assert outputs(verifier.step([row], [[]])) == [greedy([1, 2], 1)]


def test_the_step_cost_holds_what_every_stage_measured(verifier: Verifier) -> None:
    result = verifier.step([RequestRow(1, 0, [1, 2], 2, 0.0)], [[3, 4]])
    cost = StepCost.from_tensor(result.step_cost)
    assert cost is not None
    assert cost.draft == DraftCost(1, 2, 3, 4, 5)
    assert cost.estimate_ms == 0.5
    assert (cost.verify_rows, cost.verify_tokens) == (1, 4)
    assert cost.verify_ms > 0
    assert result.next_draft_limit.tolist() == [9]


def test_drafts_that_the_target_does_not_have_are_refused_before_anything_is_computed() -> None:
    verifier = Verifier()
    with pytest.raises(ContractError, match="DRAFT_TOKENS has 7; a token id of the target is 0 to 6"):
        verifier.step([RequestRow(1, 0, [3, 4], draft_limit=2)], [[5, VOCAB_SIZE]])
    assert verifier.model.num_computed_tokens == 0

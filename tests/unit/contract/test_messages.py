"""Validation, concatenation and splitting of the step's messages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.step_requests import RequestRow, step_request
from tests.unit.contract.drafts import draft

from adaptive_verification.contract import Draft, DraftCost, StepCost, StepRequest, StepResult
from adaptive_verification.contract.hidden_states import NO_STATES, RowStates, for_rows, of_rows
from adaptive_verification.contract.message import Message
from adaptive_verification.errors import ContractError


def request() -> StepRequest:
    return step_request([RequestRow(5, 0, [1, 2, 3]), RequestRow(6, 4, [9])], release=[7])


def assert_equal(one: Message, other: Message) -> None:
    for field in dataclasses.fields(one):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_count", [3, 2], r"TOKENS has 4 entries; it must have 5 \(the sum of TOKEN_COUNT\)"),
        ("token_count", [4, 0], r"TOKEN_COUNT\[1\] is 0; it must be at least 1"),
        ("context_length", [0], r"CONTEXT_LENGTH \(line 0 of REQUEST_ROWS\) has 1 entries; it must have 2 \(one entry"),
        ("context_length", [0, -1], r"CONTEXT_LENGTH\[1\] is -1; it must be at least 0"),
        ("draft_limit", [-2, 0], r"DRAFT_LIMIT\[0\] is -2; it must be at least -1"),
        ("model_draft_limit", [0, -1], r"MODEL_DRAFT_LIMIT\[1\] is -1; it must be at least 0"),
        ("tokens", [1, 2, -3, 9], r"TOKENS\[2\] is -3"),
        ("temperature", [1.0, float("nan")], r"TEMPERATURE\[1\] is nan; it must be finite"),
        ("temperature", [1.0, float("inf")], r"TEMPERATURE\[1\] is inf; it must be finite"),
        ("temperature", [-1.0, 0.0], r"TEMPERATURE\[0\] is -1.0"),
        ("top_p", [0.0, 1.0], r"TOP_P\[0\] is 0.0; it must be above 0 and at most 1"),
        ("top_p", [0.5, 1.5], r"TOP_P\[1\] is 1.5; it must be above 0 and at most 1"),
        ("top_p", [float("nan"), 1.0], r"TOP_P\[0\] is nan"),
        ("top_k", [0, -4], r"TOP_K\[1\] is -4"),
        ("acceptance", [1, 2], r"ACCEPTANCE\[1\] is 2; it must be 0 or 1"),
        ("acceptance", [-1, 0], r"ACCEPTANCE\[0\] is -1; it must be 0 or 1"),
        ("wants_log_probs", [0, 2], r"WANTS_LOG_PROBS\[1\] is 2; it must be 0 or 1"),
        ("previous_accepted", [-2, 0], r"PREVIOUS_ACCEPTED\[0\] is -2"),
        ("previous_hidden_start", [0, -1], r"PREVIOUS_HIDDEN_START\[1\] is -1; it must be at least 0"),
        ("previous_hidden_count", [1, -1], r"PREVIOUS_HIDDEN_COUNT\[1\] is -1; it must be at least 0"),
        ("sequence_id", [5, 5], "names a sequence twice"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: list[float], message: str) -> None:
    good = request()
    tensor = torch.tensor(value, dtype=getattr(good, field).dtype)
    with pytest.raises(ContractError, match=message):
        dataclasses.replace(good, **{field: tensor}).validate()


def test_the_ends_of_every_range_are_allowed() -> None:
    least = torch.tensor([0.0, 1.0]).nextafter(torch.tensor([1.0, 0.0]))  # above 0, below 1
    dataclasses.replace(request(), top_p=least, temperature=torch.tensor([0.0, 3e38])).validate()
    most = torch.full((2,), 2**31 - 1, dtype=torch.int32)
    dataclasses.replace(request(), context_length=most, draft_limit=most, model_draft_limit=most, top_k=most).validate()


def test_a_wrong_type_or_shape_is_named() -> None:
    with pytest.raises(ContractError, match=r"TOKENS is \[4\] torch.float32; it must be one-dimensional torch.int32"):
        dataclasses.replace(request(), tokens=torch.zeros(4)).validate()
    with pytest.raises(ContractError, match=r"SEED \(line 1 of IDS_AND_SEEDS\) is \[2, 1\] torch.int64"):
        dataclasses.replace(request(), seed=torch.zeros(2, 1, dtype=torch.int64)).validate()


def test_ragged_lengths_between_the_stages_are_checked() -> None:
    wrong = dataclasses.replace(draft(), candidate_probs=torch.ones(2))
    with pytest.raises(ContractError, match="CANDIDATE_PROBS has 2 entries; it must have 3"):
        wrong.validate()


def test_counts_that_fit_in_sum_alone_are_refused() -> None:
    """What reads the drafts goes by them."""
    counts = torch.tensor([-1, 3], dtype=torch.int32)
    with pytest.raises(ContractError, match=r"DRAFTED_COUNT\[0\] is -1; it must be at least 0"):
        dataclasses.replace(draft(), drafted_count=counts).validate()


def test_a_wide_tensor_has_the_same_width_everywhere_or_none() -> None:
    dataclasses.replace(draft(), draft_features=torch.empty(0)).validate()
    with pytest.raises(ContractError, match="DRAFT_FEATURES has 5 entries; it must have as many for each of 2"):
        dataclasses.replace(draft(), draft_features=torch.zeros(5)).validate()


def test_splitting_undoes_concatenating() -> None:
    one, other = draft(), draft()
    other.draft_tokens = other.draft_tokens + 10
    merged = Draft.concatenate([one, other]).validate()
    assert merged.num_rows == 4
    for part, original in zip(merged.split([2, 2]), [one, other], strict=True):
        assert_equal(part, original)


def test_concatenated_requests_release_what_each_releases() -> None:
    merged = StepRequest.concatenate([request(), step_request([RequestRow(8, 0, [1])], release=[1, 2])])
    assert merged.release.tolist() == [7, 1, 2]
    assert merged.sequence_id.tolist() == [5, 6, 8]
    assert merged.tokens.tolist() == [1, 2, 3, 9, 1]


def result_states(rows: list[RowStates]) -> dict[str, torch.Tensor]:
    """A result's fields, from those of a request with the same rows."""
    return {name.removeprefix("previous_"): tensor for name, tensor in for_rows(rows).items()}  # type: ignore[misc]


def test_no_tensor_of_the_ensemble_is_both_asked_and_answered() -> None:
    asked = {tensor.name for tensor in StepRequest.wire_tensors()}
    answered = {tensor.name for tensor in StepResult.wire_tensors()}
    assert not asked & answered, "an ensemble has one name space: the answer would be the question"


def result_of(
    output_counts: list[int], states: list[RowStates] | None = None, step_cost: torch.Tensor | None = None
) -> StepResult:
    counts = torch.tensor(output_counts, dtype=torch.int32)
    return StepResult(
        output_count=counts,
        status=counts,
        drafted_count=counts,
        admitted_count=counts,
        next_draft_limit=counts,
        output_tokens=torch.zeros(sum(output_counts), dtype=torch.int32),
        log_probs=torch.zeros(sum(output_counts)),
        **result_states(states or [NO_STATES] * len(output_counts)),
        step_cost=torch.empty(0) if step_cost is None else step_cost,
    ).validate()


def test_each_row_of_a_split_result_keeps_its_hidden_states() -> None:
    states = [
        RowStates(7, 2, torch.arange(6, dtype=torch.uint8)),
        NO_STATES,
        RowStates(0, 1, torch.tensor([9, 8, 7], dtype=torch.uint8)),
    ]
    first, rest = result_of([1, 1, 1], states).split([1, 2])
    assert [row.states.tolist() for row in of_rows(first)] == [[0, 1, 2, 3, 4, 5]]
    assert [(row.start, row.num_states, row.states.tolist()) for row in of_rows(rest)] == [
        (0, 0, []),
        (0, 1, [9, 8, 7]),
    ]
    merged = StepResult.concatenate([rest, first])
    assert [row.states.tolist() for row in of_rows(merged)] == [[], [9, 8, 7], [0, 1, 2, 3, 4, 5]]


def test_hidden_states_of_uneven_width_are_refused() -> None:
    broken = dataclasses.replace(
        result_of([1, 1], [RowStates(0, 2, torch.zeros(6, dtype=torch.uint8)), NO_STATES]),
        hidden_states=torch.zeros(5, dtype=torch.uint8),
    )
    with pytest.raises(ContractError, match="HIDDEN_STATES has 5 entries; it must have as many for each of 2"):
        broken.validate()


def test_every_part_of_a_merged_step_learns_its_cost() -> None:
    cost = StepCost(DraftCost(1, 2, 3, 4, 5), 6, 7, 8, 9).to_tensor()
    result = result_of([1, 1], step_cost=cost)
    for part in result.split([1, 1]):
        assert StepCost.from_tensor(part.step_cost) == StepCost(DraftCost(1, 2, 3, 4, 5), 6, 7, 8, 9)


def test_an_empty_cost_means_nothing_was_measured() -> None:
    assert StepCost.from_tensor(torch.empty(0)) is None
    assert DraftCost.from_tensor(torch.empty(0)) is None


def test_a_step_of_no_rows_is_legal() -> None:
    empty = step_request([], release=[3])
    assert empty.num_rows == 0

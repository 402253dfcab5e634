"""The drafter that looks up: which rows it drafts, which the model, and that both come out in the request's order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions

from adaptive_verification.contract import (
    FILL_ONLY,
    STATUS_BAD_TOKEN,
    STATUS_CONTEXT_FULL,
    STATUS_NO_SLOT,
    STATUS_NOT_CACHED,
    STATUS_OK,
    Draft,
    StepRequest,
)
from adaptive_verification.contract.step import Drafter
from adaptive_verification.drafting.lookup_stage import MAX_MATCH, LookupDrafter
from adaptive_verification.drafting.stage import CausalDrafter

VOCAB_SIZE = 9
REPEATED = [1, 2, 3, 4, 5, 1, 2, 3]
"""Its last three tokens were followed by 4, 5, 1, 2, 3."""
NEW = [1, 2, 3, 4, 5, 6]
"""Nothing in it occurs twice."""


def model_drafter(num_slots: int = 8, capacity: int = 64, *, with_features: bool = False) -> CausalDrafter:
    return CausalDrafter(
        TableModel(VOCAB_SIZE, random_distributions(VOCAB_SIZE, seed=1), num_slots, capacity),  # type: ignore[arg-type]
        target_vocab_size=VOCAB_SIZE,
        idle_seconds=60,
        draft_top_k=4,
        max_catch_up_tokens=100,
        with_features=with_features,
    )


def lookup_drafter(model: Drafter | None = None, *, num_slots: int = 8, capacity: int = 64) -> LookupDrafter:
    return LookupDrafter(
        model, min_match=3, num_slots=num_slots, capacity=capacity, idle_seconds=60, vocab_size=VOCAB_SIZE
    )


def step(drafter: Drafter, *rows: RequestRow, release: tuple[int, ...] = ()) -> Draft:
    return drafter.step(step_request(rows, release)).validate()


def tokens_of(draft: Draft) -> list[list[int]]:
    return [tokens.tolist() for tokens in draft.draft_tokens.split(draft.drafted_count.tolist())]


def test_what_followed_the_last_tokens_is_drafted_with_certainty() -> None:
    draft = step(lookup_drafter(), RequestRow(1, 0, REPEATED, draft_limit=7))
    assert tokens_of(draft) == [[4, 5, 1, 2, 3, 4, 5]]
    assert draft.draft_match_length.tolist() == [3]
    assert draft.candidate_ids.tolist() == draft.draft_tokens.tolist()
    assert draft.candidate_probs.tolist() == [1.0] * 7
    assert draft.draft_log_odds.tolist() == [0.0] * 7


def test_looked_up_drafts_between_a_models_have_features_that_say_nothing() -> None:
    drafter = LookupDrafter(
        model_drafter(with_features=True),
        min_match=3,
        num_slots=8,
        capacity=64,
        idle_seconds=60,
        vocab_size=VOCAB_SIZE,
        num_features=3,
    )
    rows = [RequestRow(i, 0, tokens, draft_limit=2) for i, tokens in enumerate((NEW, REPEATED, NEW[1:]))]
    draft = step(drafter, *rows)
    alone = model_drafter(with_features=True)
    models = [step(alone, row).draft_features.view(2, 3) for row in (rows[0], rows[2])]
    features = draft.draft_features.view(3, 2, 3)
    torch.testing.assert_close(features, torch.stack([models[0], torch.zeros(2, 3), models[1]]))
    looked_up_only = step(drafter, RequestRow(9, 0, REPEATED, draft_limit=2))
    assert looked_up_only.draft_features.tolist() == [0.0] * 6


def test_without_a_model_a_row_without_a_match_has_no_drafts() -> None:
    draft = step(lookup_drafter(), RequestRow(1, 0, NEW, draft_limit=3), RequestRow(2, 0, REPEATED, draft_limit=2))
    assert tokens_of(draft) == [[], [4, 5]]
    assert draft.draft_match_length.tolist() == [0, 3]


def test_a_match_can_reach_back_over_several_requests_into_the_prompt() -> None:
    drafter = lookup_drafter()
    step(drafter, RequestRow(1, 0, [7, 1, 2, 3], draft_limit=FILL_ONLY))
    step(drafter, RequestRow(1, 4, [4, 5], draft_limit=0))
    draft = step(drafter, RequestRow(1, 6, [7, 1, 2, 3], draft_limit=2))
    assert tokens_of(draft) == [[4, 5]]
    assert draft.draft_match_length.tolist() == [4]


def test_a_longer_match_than_any_is_told_as_the_longest() -> None:
    draft = step(lookup_drafter(), RequestRow(1, 0, [1] * 60, draft_limit=1))
    assert draft.draft_match_length.tolist() == [MAX_MATCH]


@pytest.mark.parametrize("limit", [0, FILL_ONLY])
def test_a_row_that_wants_no_drafts_gets_none(limit: int) -> None:
    draft = step(lookup_drafter(model_drafter()), RequestRow(1, 0, REPEATED, draft_limit=limit))
    assert tokens_of(draft) == [[]]
    assert draft.draft_match_length.tolist() == [0]


def test_looked_up_drafts_do_not_count_against_the_models_limit() -> None:
    rows = [RequestRow(i, 0, tokens, draft_limit=4, model_draft_limit=1) for i, tokens in enumerate((REPEATED, NEW))]
    assert step(lookup_drafter(model_drafter()), *rows).drafted_count.tolist() == [4, 1]


def test_the_callers_tokens_are_the_truth_where_they_differ_from_those_known() -> None:
    drafter = lookup_drafter()
    step(drafter, RequestRow(1, 0, [1, 2, 3, 4, 5, 6, 6, 6], draft_limit=1))
    draft = step(drafter, RequestRow(1, 3, [8, 1, 2, 3], draft_limit=3))
    assert tokens_of(draft) == [[8, 1, 2]]


def test_drafts_are_cut_to_the_room_in_the_cache() -> None:
    assert step(lookup_drafter(capacity=10), RequestRow(1, 0, REPEATED, draft_limit=7)).drafted_count.tolist() == [2]
    assert step(lookup_drafter(capacity=8), RequestRow(1, 0, REPEATED, draft_limit=7)).drafted_count.tolist() == [0]


@pytest.mark.parametrize("with_model", [False, True])
def test_a_row_that_is_not_ok_has_no_drafts_and_disturbs_nobody(with_model: bool) -> None:
    draft = step(
        lookup_drafter(model_drafter() if with_model else None),
        RequestRow(1, 5, REPEATED, draft_limit=2),
        RequestRow(2, 0, [*REPEATED, VOCAB_SIZE], draft_limit=2),
        RequestRow(3, 0, [1] * 65, draft_limit=2),
        RequestRow(4, 0, REPEATED, draft_limit=2),
    )
    assert draft.draft_status.tolist() == [STATUS_NOT_CACHED, STATUS_BAD_TOKEN, STATUS_CONTEXT_FULL, STATUS_OK]
    assert tokens_of(draft) == [[], [], [], [4, 5]]
    assert draft.draft_match_length.tolist() == [0, 0, 0, 3]


def test_a_row_that_only_the_model_or_only_the_index_has_lost_is_resent() -> None:
    for model_slots, index_slots in ((1, 8), (8, 1)):
        drafter = lookup_drafter(model_drafter(model_slots), num_slots=index_slots)
        row = RequestRow(1, 0, REPEATED, draft_limit=2)
        assert step(drafter, row).draft_status.tolist() == [STATUS_OK]
        step(drafter, RequestRow(2, 0, REPEATED, draft_limit=2))  # takes the slot of 1 where there is one slot only
        lost = step(drafter, RequestRow(1, 8, [4], draft_limit=2))
        assert (lost.draft_status.tolist(), tokens_of(lost)) == ([STATUS_NOT_CACHED], [[]])
        assert step(drafter, row).draft_status.tolist() == [STATUS_OK]


@pytest.mark.parametrize("with_model", [False, True])
def test_slots_are_bounded_and_a_released_sequence_is_forgotten(with_model: bool) -> None:
    drafter = lookup_drafter(model_drafter() if with_model else None, num_slots=2)
    rows = [RequestRow(i, 0, REPEATED, draft_limit=1) for i in range(3)]
    assert step(drafter, *rows).draft_status.tolist() == [STATUS_OK, STATUS_OK, STATUS_NO_SLOT]
    step(drafter, release=(0, 1))
    assert drafter._indices == {}
    assert step(drafter, RequestRow(0, 8, [4], draft_limit=1)).draft_status.tolist() == [STATUS_NOT_CACHED]


def test_a_sequence_released_and_begun_anew_in_one_step_knows_nothing_of_its_past() -> None:
    drafter = lookup_drafter()
    step(drafter, RequestRow(1, 0, REPEATED, draft_limit=1))
    draft = step(drafter, RequestRow(1, 0, [2, 3, 4], draft_limit=1), release=(1,))
    assert tokens_of(draft) == [[]]


class Recording:
    """A drafter that keeps what it was asked."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.request: StepRequest | None = None

    def step(self, request: StepRequest) -> Draft:
        self.request = request
        return self._drafter.step(request)


def test_each_row_is_what_its_own_drafter_makes_of_it_in_the_requests_order() -> None:
    rows = [
        RequestRow(i, 0, REPEATED if i in (1, 2, 5) else [*NEW, i], draft_limit=limit, seed=i, temperature=i % 2)
        for i, limit in enumerate((2, 3, 1, 4, FILL_ONLY, 2, 0, 3))
    ]
    model = Recording(model_drafter())
    draft = step(lookup_drafter(model), *rows)
    assert model.request is not None
    assert model.request.draft_limit.tolist() == [2, 0, 0, 4, FILL_ONLY, 0, 0, 3]
    assert draft.draft_match_length.tolist() == [0, 3, 3, 0, 0, 3, 0, 0]
    by_lookup, by_model = lookup_drafter(), model_drafter()
    for row, merged in zip(rows, draft.split([1] * len(rows)), strict=True):
        alone = step(by_lookup if row.tokens == REPEATED else by_model, row)
        for field in (field.name for field in dataclasses.fields(Draft)):
            if field != "draft_cost":
                assert torch.equal(getattr(merged, field), getattr(alone, field)), (row.sequence_id, field)


def test_the_models_cost_is_the_steps() -> None:
    rows = [RequestRow(1, 0, NEW, draft_limit=2), RequestRow(2, 0, REPEATED, draft_limit=2)]
    inner = model_drafter()
    seen: list[Draft] = []

    class Keeping:
        def step(self, request: StepRequest) -> Draft:
            seen.append(inner.step(request))
            return seen[-1]

    merged = step(lookup_drafter(Keeping()), *rows)
    assert torch.equal(merged.draft_cost, seen[0].draft_cost)
    assert merged.draft_cost[3].item() == 1  # one row was drafted by the model


def test_a_row_falls_back_to_the_model_when_its_match_ends() -> None:
    """The model has noted the looked-up stretch's tokens and computes them now."""
    drafter, alone = lookup_drafter(model_drafter()), model_drafter()
    step(drafter, RequestRow(1, 0, REPEATED, draft_limit=3))
    row = RequestRow(1, 8, [4, 8, 7], draft_limit=3, temperature=0.0)
    expected = step(alone, dataclasses.replace(row, context_length=0, tokens=[*REPEATED, *row.tokens]))
    assert tokens_of(step(drafter, row)) == tokens_of(expected) != [[]]

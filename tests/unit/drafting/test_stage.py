"""The drafter: what it computes when, and that a row's drafts depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions

from adaptive_verification.contract import (
    FILL_ONLY,
    STATUS_BAD_TOKEN,
    STATUS_CONTEXT_FULL,
    STATUS_NOT_CACHED,
    STATUS_OK,
    Draft,
)
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.sampling.truncation import scale, truncate

VOCAB_SIZE = 7
Q = random_distributions(VOCAB_SIZE, seed=1)


class Drafter:
    """A drafter over a table, with the model in sight."""

    def __init__(
        self,
        *,
        capacity: int = 64,
        max_catch_up_tokens: int = 100,
        draft_top_k: int = 7,
        with_features: bool = False,
    ) -> None:
        self.model = TableModel(VOCAB_SIZE, Q, num_slots=8, capacity=capacity)
        self.stage = CausalDrafter(
            self.model,  # type: ignore[arg-type]
            target_vocab_size=VOCAB_SIZE,
            idle_seconds=60,
            draft_top_k=draft_top_k,
            max_catch_up_tokens=max_catch_up_tokens,
            with_features=with_features,
        )

    def step(self, *rows: RequestRow) -> Draft:
        return self.stage.step(step_request(rows)).validate()


@pytest.fixture
def drafter() -> Drafter:
    return Drafter()


def tokens_of(draft: Draft) -> list[list[int]]:
    return [tokens.tolist() for tokens in draft.draft_tokens.split(draft.drafted_count.tolist())]


def test_greedy_drafts_are_the_most_likely_tokens(drafter: Drafter) -> None:
    draft = drafter.step(RequestRow(1, 0, [3, 4], draft_limit=3, temperature=0.0))
    prefix: tuple[int, ...] = (3, 4)
    expected: list[int] = []
    for _ in range(3):
        expected.append(int(Q(prefix).argmax()))
        prefix = (*prefix, expected[-1])
    assert tokens_of(draft) == [expected]
    assert draft.candidate_probs.tolist() == [1.0, 1.0, 1.0]
    assert draft.candidate_ids.tolist() == expected


def test_candidates_are_the_distribution_that_the_request_asks_for(drafter: Drafter) -> None:
    draft = drafter.step(RequestRow(1, 0, [3], draft_limit=1, temperature=0.7, top_k=4, top_p=0.8))
    temperature = torch.tensor([0.7])
    expected = truncate(scale(Q((3,)).log()[None], temperature), temperature, torch.tensor([4]), torch.tensor([0.8]))
    support = expected.probs[0] > 0
    assert draft.candidate_ids.tolist() == expected.ids[0, support].tolist()
    assert draft.candidate_probs.tolist() == pytest.approx(expected.probs[0, support].tolist())


def test_the_log_odds_are_of_the_most_likely_token_over_the_whole_vocabulary() -> None:
    draft = Drafter(draft_top_k=2).step(RequestRow(1, 0, [3], draft_limit=1))
    largest = float(Q((3,)).max())
    assert draft.draft_log_odds.item() == pytest.approx(float(torch.logit(torch.tensor(largest))), abs=1e-5)


def test_the_features_are_of_the_whole_distribution_at_the_requests_temperature_and_of_the_drawn_token() -> None:
    rows = [RequestRow(i, 0, [3], draft_limit=1 + i, temperature=0.5, top_k=2, seed=i) for i in range(3)]
    draft = Drafter(with_features=True).step(*rows)
    features = draft.draft_features.view(-1, 3).split(draft.drafted_count.tolist())
    for of_row, tokens in zip(features, tokens_of(draft), strict=True):
        for depth, (measured, drawn) in enumerate(zip(of_row.tolist(), tokens, strict=True)):
            q = (Q((3, *tokens[:depth])).log() / 0.5).softmax(-1)
            first, second = q.topk(2).values
            expected = [(q * q.log()).sum(), (first / second).log(), torch.logit(q[drawn])]
            assert measured == pytest.approx([float(value) for value in expected], abs=1e-5)


def test_nothing_but_the_log_odds_is_measured_unless_asked_for(drafter: Drafter) -> None:
    assert drafter.step(RequestRow(1, 0, [3], draft_limit=2)).draft_features.numel() == 0


def test_a_rows_drafts_do_not_depend_on_the_other_rows(drafter: Drafter) -> None:
    rows = [RequestRow(i, 0, [i % 7, 2], draft_limit=1 + i % 3, temperature=1.0, seed=i) for i in range(6)]
    together = tokens_of(drafter.step(*rows))
    alone = [tokens_of(Drafter().step(row))[0] for row in rows]
    assert together == alone


def test_a_row_that_wants_no_drafts_costs_nothing_until_it_does(drafter: Drafter) -> None:
    drafter.step(RequestRow(1, 0, [1, 2], draft_limit=FILL_ONLY))
    drafter.step(RequestRow(1, 2, [3], draft_limit=0))
    assert drafter.model.num_computed_tokens == 0
    late = drafter.step(RequestRow(1, 3, [4], draft_limit=2, temperature=0.0))
    at_once = Drafter().step(RequestRow(1, 0, [1, 2, 3, 4], draft_limit=2, temperature=0.0))
    assert tokens_of(late) == tokens_of(at_once)
    assert drafter.model.num_computed_tokens == 4 + 1


def test_a_long_context_is_caught_up_in_parts_while_others_draft() -> None:
    drafter = Drafter(max_catch_up_tokens=4)
    long = RequestRow(1, 0, [1] * 10, draft_limit=2, temperature=0.0)
    draft = drafter.step(long, RequestRow(2, 0, [5], draft_limit=2, temperature=0.0))
    assert draft.drafted_count.tolist() == [0, 2]
    again = RequestRow(1, 0, [1] * 10, draft_limit=2, temperature=0.0)
    counts = [drafter.step(again).drafted_count.tolist() for _ in range(2)]
    assert counts == [[0], [2]]


def test_drafts_are_cut_to_the_room_in_the_cache() -> None:
    draft = Drafter(capacity=6).step(RequestRow(1, 0, [1, 2, 3, 4], draft_limit=5, temperature=0.0))
    assert draft.drafted_count.tolist() == [2]
    assert Drafter(capacity=4).step(RequestRow(1, 0, [1, 2, 3, 4], draft_limit=5)).drafted_count.tolist() == [0]


def test_accepted_drafts_are_not_computed_again(drafter: Drafter) -> None:
    first = tokens_of(drafter.step(RequestRow(1, 0, [1, 2], draft_limit=3, temperature=0.0)))[0]
    computed = drafter.model.num_computed_tokens
    drafter.step(RequestRow(1, 2, [*first[:2], 6], draft_limit=1, temperature=0.0))
    assert drafter.model.num_computed_tokens - computed == 1


def test_a_row_that_is_not_ok_drafts_nothing_and_disturbs_nobody(drafter: Drafter) -> None:
    draft = drafter.step(
        RequestRow(1, 5, [1], draft_limit=2),
        RequestRow(2, 0, [VOCAB_SIZE], draft_limit=2),
        RequestRow(3, 0, [1] * 65, draft_limit=2),
        RequestRow(4, 0, [1], draft_limit=2),
    )
    assert draft.draft_status.tolist() == [STATUS_NOT_CACHED, STATUS_BAD_TOKEN, STATUS_CONTEXT_FULL, STATUS_OK]
    assert draft.drafted_count.tolist() == [0, 0, 0, 2]


def test_a_step_without_rows_only_releases(drafter: Drafter) -> None:
    drafter.step(RequestRow(1, 0, [1], draft_limit=1))
    drafter.stage.step(step_request([], release=[1]))
    assert drafter.step(RequestRow(1, 1, [2], draft_limit=1)).draft_status.tolist() == [STATUS_NOT_CACHED]

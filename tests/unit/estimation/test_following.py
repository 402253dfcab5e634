"""Whose hidden states are handed on: everybody's while drafting pays, else of a few."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.unit.estimation.chain import KEY, make_draft, make_request

from adaptive_verification.contract import FILL_ONLY, NOT_FOLLOWED
from adaptive_verification.estimation.cost_model import DRAFT_EXTEND, DRAFT_PREFILL, VERIFY, CostCurve
from adaptive_verification.estimation.following import newly_followed
from adaptive_verification.estimation.policy import Block, Decision
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings

DEAR_DRAFTS = {
    VERIFY: CostCurve((1, 64), (1.0, 64.0)),
    DRAFT_PREFILL: CostCurve((1, 64), (1000.0, 2000.0)),
    DRAFT_EXTEND: CostCurve((1, 64), (1000.0, 2000.0)),
}
CHEAP_DRAFTS = {
    VERIFY: CostCurve((1, 64), (10.0, 10.1)),
    DRAFT_PREFILL: CostCurve((1, 64), (0.01, 0.02)),
    DRAFT_EXTEND: CostCurve((1, 64), (0.01, 0.02)),
}


def stage(curves: dict[str, CostCurve], **settings: Any) -> EstimatorStage:
    validated = EstimatorSettings.model_validate({"exploration_share": 0.0, **settings})
    return EstimatorStage(validated, evidence_key=KEY, curves=curves, needs_states=True)


def followed(estimator: EstimatorStage, ids: list[int], *, confirmed: int = 5, begins: bool = False) -> list[bool]:
    """Which rows of a step without drafts are followed from then on."""
    request = make_request(
        ids,
        [confirmed] * len(ids),
        limits=[7] * len(ids),
        model_limits=[0] * len(ids),
        token_count=[confirmed if begins else 1] * len(ids),
    )
    estimate = estimator.step(request, make_draft([[]] * len(ids)))
    return [limit != NOT_FOLLOWED for limit in estimate.next_draft_limit.tolist()]


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (8, 1), (9, 2), (32, 4)])
def test_while_nothing_is_drafted_one_row_in_eight_that_begin_is_followed(rows: int, expected: int) -> None:
    began = np.ones(rows, dtype=bool)
    chosen = newly_followed(began, began, ~began, depth=0)
    assert chosen.tolist() == [True] * expected + [False] * (rows - expected)
    assert newly_followed(began, began, ~began, depth=1).all()


def test_rows_that_are_followed_already_count() -> None:
    begins = np.array([False, True, True, True] + [False] * 12)
    already = np.array([True] + [False] * 15)
    assert newly_followed(begins, begins, already, depth=0).nonzero()[0].tolist() == [1]
    already[-1] = True
    assert not newly_followed(begins, begins, already, depth=0).any()


def test_while_drafting_pays_those_that_began_before_join_one_by_one() -> None:
    candidates = np.array([False, True, True, True])
    begins = np.array([False, False, True, False])
    assert newly_followed(candidates, begins, ~candidates, depth=1).nonzero()[0].tolist() == [1, 2]


def test_while_nothing_is_drafted_none_of_those_joins_unless_nobody_is_left() -> None:
    candidates = np.array([True, True, True, False])
    nobody = np.zeros(4, dtype=bool)
    assert not newly_followed(candidates, nobody, ~candidates, depth=0).any()
    assert newly_followed(candidates, nobody, nobody, depth=0).nonzero()[0].tolist() == [0]
    assert newly_followed(candidates, np.array([False, True, False, False]), nobody, depth=0).nonzero()[0].tolist() == [
        1
    ]


def test_who_is_followed_stays_so() -> None:
    estimator = stage(DEAR_DRAFTS)
    assert followed(estimator, [1, 2, 3], begins=True) == [True, False, False]
    assert followed(estimator, [2, 3, 1]) == [False, False, True]
    assert followed(estimator, [2, 3]) == [True, False], "the one that was followed has gone"
    assert followed(estimator, [4, 2], begins=True) == [True, False], "it is sent anew, so it begins anew"
    assert followed(estimator, [1, 2, 3, 4]) == [True, False, False, True]


def test_while_drafting_pays_everybody_who_begins_is_followed() -> None:
    estimator = stage(CHEAP_DRAFTS)
    assert followed(estimator, [1, 2, 3], begins=True) == [True, True, True]


def test_a_sequence_that_the_estimator_has_forgotten_may_be_followed() -> None:
    assert followed(stage(DEAR_DRAFTS), [1, 2, 3], confirmed=50) == [True, True, True]


def test_rows_that_want_no_drafts_are_not_among_the_few() -> None:
    estimator = stage(DEAR_DRAFTS)
    request = make_request([1, 2, 3], [5] * 3, limits=[0, FILL_ONLY, 7], model_limits=[0] * 3, token_count=[5] * 3)
    limits = estimator.step(request, make_draft([[]] * 3)).next_draft_limit.tolist()
    assert [limit != NOT_FOLLOWED for limit in limits] == [False, True, False], "a prompt's first part may be"


def test_only_followed_rows_explore() -> None:
    estimator = stage(DEAR_DRAFTS, exploration_share=0.5)
    ids = list(range(16))
    follows = followed(estimator, ids, begins=True)
    explored = set()
    for confirmed in range(6, 1200):
        request = make_request(ids, [confirmed] * 16, limits=[7] * 16, model_limits=[0] * 16)
        limits = estimator.step(request, make_draft([[]] * 16)).next_draft_limit.tolist()
        explored |= {row for row, limit in enumerate(limits) if limit > 0}
    assert explored
    assert explored <= {row for row in ids if follows[row]} == {0, 1}


def test_a_drafter_without_states_can_draft_for_every_row() -> None:
    estimator = EstimatorStage(EstimatorSettings(), evidence_key=KEY, curves=DEAR_DRAFTS)
    assert followed(estimator, [1, 2, 3], begins=True) == [True, True, True]


def test_in_a_step_that_brings_more_than_the_last_one_gave_a_model_has_no_states_to_draft_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimator = stage(CHEAP_DRAFTS)
    limits = []
    decide = estimator._policy.decide

    def seen(block: Block) -> Decision:
        limits.append(block.limits.tolist())
        return decide(block)

    monkeypatch.setattr(estimator._policy, "decide", seen)
    drafts = make_draft([[], [], [0.0] * 3], match_length=[0, 0, 5])
    estimator.step(make_request([1, 2, 3], [9, 5, 20], limits=[7] * 3, token_count=[9, 5, 20]), drafts)
    estimator.step(make_request([1, 2, 3], [10, 15, 21], limits=[7] * 3, token_count=[1, 10, 1]), make_draft([[]] * 3))
    assert limits == [[0, 0, 3], [7, 0, 7]]


def test_whom_to_follow_is_decided_as_if_a_model_could_draft_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a few followed rows, for which drafting does not pay, would keep everybody from being followed."""
    estimator = stage(DEAR_DRAFTS)
    decide = estimator._policy.decide
    monkeypatch.setattr(
        estimator._policy, "decide", lambda block: dataclasses.replace(decide(block), depth=0, depth_of_all=1)
    )
    assert followed(estimator, [1, 2, 3], begins=True) == [True, True, True]

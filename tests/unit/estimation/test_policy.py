from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.estimation.chain import CURVES

from adaptive_verification.errors import SettingsError
from adaptive_verification.estimation.budget import admit, best_budget, survival
from adaptive_verification.estimation.cost_model import (
    DRAFT_EXTEND,
    DRAFT_PREFILL,
    VERIFY,
    VERIFY_CONTEXT,
    CostCurve,
    CostModel,
)
from adaptive_verification.estimation.exploration import NEAR_TOKENS, UNKNOWN_BACKLOG
from adaptive_verification.estimation.policy import (
    COLD_FACTOR,
    EXPLORED_BEYOND_PLAN,
    STEPS_BETWEEN_PLANS,
    Block,
    make_policy,
)
from adaptive_verification.settings import EstimatorSettings

SPREAD = survival(np.array([[0.9] * 16, [0.6] * 16, [0.3] * 16], dtype=np.float32))
"""What three rows are expected to survive."""


def _block(**changes: Any) -> Block:
    """Three rows, four drafts deep."""
    acceptance = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2], [0.95, 0.1, 0.9, 0.9]], dtype=np.float32)
    values: dict[str, Any] = {
        "counts": np.array([4, 4, 3]),
        "log_odds": np.log(acceptance) - np.log1p(-acceptance),
        "survival": survival(acceptance),
        "looked_up": np.zeros(3, dtype=bool),
        "followed": np.ones(3, dtype=bool),
        "limits": np.array([4, 4, 3]),
        "expected_survival": survival(np.full((3, 16), 0.7, dtype=np.float32)),
        "exploring": np.zeros(3, dtype=bool),
        "base_tokens": 3,
        "prompt_tokens": 0,
        "sampling_rows": 3,
        "context_tokens": 0,
        "backlog": np.zeros(3, dtype=np.int64),
        "settled": False,
        "recent_survival": survival(np.full((64, 7), 0.7, dtype=np.float32)),
        "step": 0,
        "cold": False,
    }
    return Block(**{**values, **changes})


def _decide(costs: CostModel | None = None, block: Block | None = None, **settings: Any) -> tuple[list[int], list[int]]:
    decision = make_policy(EstimatorSettings.model_validate(settings), costs or CostModel()).decide(block or _block())
    return decision.admitted.tolist(), decision.next_limit.tolist()


def test_off_admits_everything_and_limits_nothing() -> None:
    assert _decide(trim="off") == ([4, 4, 3], [16, 16, 16])


def test_adaptive_without_cost_curves_admits_everything_and_limits_nothing() -> None:
    assert _decide(trim="adaptive") == ([4, 4, 3], [16, 16, 16])


def test_a_fixed_length_admits_so_many_and_drafts_no_more() -> None:
    assert _decide(trim="fixed_length", fixed_length=3) == ([3, 3, 3], [3, 3, 3])
    assert _decide(trim="fixed_length", fixed_length=0) == ([0, 0, 0], [0, 0, 0])
    with pytest.raises(SettingsError, match="fixed_length=5"):
        _decide(trim="fixed_length", fixed_length=5, max_draft_tokens=4)


@pytest.mark.parametrize(
    ("threshold", "admitted"),
    [(0.0, [4, 4, 3]), (0.3499, [4, 2, 1]), (0.65, [3, 0, 1]), (0.92, [0, 0, 1]), (1.0, [0, 0, 0])],
)
def test_a_threshold_admits_until_q_max_falls_below_it(threshold: float, admitted: list[int]) -> None:
    assert _decide(trim="threshold", threshold=threshold)[0] == admitted


def test_adaptive_admits_the_best_slots_of_the_batch_up_to_the_best_budget() -> None:
    costs, block = CostModel({**CURVES, VERIFY: CostCurve((1, 14), (10.0, 40.0))}), _block()
    verify_ms = costs.all_verify_ms(3 + np.arange(12))
    budget = best_budget(block.expected_survival[:, :4], block.limits, verify_ms, price=3 / verify_ms[0])
    assert 0 < budget < 11
    assert _decide(costs, block)[0] == admit(block.survival, block.counts, budget).tolist()


def test_the_budget_does_not_look_at_the_blocks_own_scores_or_counts() -> None:
    costs = CostModel(CURVES)
    policy = make_policy(EstimatorSettings.model_validate({}), costs)
    others = [
        _block(survival=np.zeros((3, 4), np.float32)),
        _block(survival=np.ones((3, 4), np.float32)),
        _block(log_odds=np.zeros((3, 4), np.float32)),
        _block(counts=np.array([1, 0, 3])),  # a drafter may stop early because of what it drew
    ]
    assert {policy.decide(block).budget for block in others} == {policy.decide(_block()).budget}


def test_prompts_in_the_step_do_not_make_drafts_seem_cheap() -> None:
    """What they take is nobody's to save: with a cost that is a straight line, they change nothing."""
    straight = {**CURVES, VERIFY: CostCurve((1, 1000), (10.0, 10.0 + 999 * 2.0))}
    free = {DRAFT_PREFILL: CostCurve((1, 64), (1e-6, 2e-6)), DRAFT_EXTEND: CostCurve((1, 64), (1e-6, 2e-6))}
    alone, beside = (
        make_policy(EstimatorSettings.model_validate({}), CostModel({**straight, **free})).decide(block)
        for block in (_block(), _block(base_tokens=3 + 500, prompt_tokens=500))
    )
    assert 0 < alone.budget < 11
    assert (beside.budget, beside.depth) == (alone.budget, alone.depth)


def test_the_budget_of_a_settled_block_follows_its_own_scores_and_counts() -> None:
    policy = make_policy(EstimatorSettings.model_validate({}), CostModel(CURVES))

    def budget(**changes: Any) -> int:
        return policy.decide(_block(settled=True, **changes)).budget

    assert budget(survival=np.ones((3, 4), np.float32)) == 11
    assert budget(survival=np.zeros((3, 4), np.float32)) == 0
    assert budget(survival=np.ones((3, 4), np.float32), counts=np.array([1, 0, 3])) == 4
    assert budget(expected_survival=np.zeros((3, 16), np.float32)) == budget() > 0


def test_exploring_rows_keep_all_their_drafts_and_do_not_compete() -> None:
    costs = CostModel(CURVES)
    without = _decide(costs, _block(expected_survival=np.zeros((3, 16), np.float32)))[0]
    exploring = np.array([False, True, False])
    assert without == [0, 0, 0]
    assert _decide(costs, _block(expected_survival=np.zeros((3, 16), np.float32), exploring=exploring))[0] == [0, 4, 0]


def test_the_depth_is_planned_anew_every_few_steps_and_when_other_rows_are_there() -> None:
    good, hopeless = np.ones((64, 7), np.float32), np.zeros((64, 7), np.float32)
    policy = make_policy(EstimatorSettings.model_validate({"exploration_share": 0}), CostModel(CURVES))

    def depth(step: int, survivals: NDArray[np.float32], rows: int = 3) -> int:
        return policy.decide(_block(step=step, recent_survival=survivals, sampling_rows=rows)).depth

    assert depth(STEPS_BETWEEN_PLANS - 1, good) == 7
    assert depth(STEPS_BETWEEN_PLANS, hopeless) == 0
    assert [depth(STEPS_BETWEEN_PLANS + step, good) for step in range(1, STEPS_BETWEEN_PLANS + 1)] == [0, 0, 0, 7]
    assert depth(2 * STEPS_BETWEEN_PLANS + 1, hopeless, rows=2) == 0


def test_a_plan_of_no_drafts_still_lets_a_few_rows_explore_at_times_a_little_deeper() -> None:
    hopeless = {"recent_survival": np.zeros((64, 7), np.float32)}
    policy = make_policy(EstimatorSettings.model_validate({}), CostModel(CURVES))
    decisions = [policy.decide(_block(**hopeless, step=step)) for step in range(3200)]
    assert {decision.depth for decision in decisions} == {0}
    limits = np.array([decision.next_limit for decision in decisions])
    assert set(np.unique(limits)) == {0, EXPLORED_BEYOND_PLAN}
    assert ((limits > 0) == np.array([decision.explores_next for decision in decisions])).all()
    assert (limits > 0).any(0).all()


def test_the_row_whose_model_lacks_the_fewest_tokens_explores_and_what_it_lacks_is_its_cost() -> None:
    hopeless = {"recent_survival": np.zeros((64, 7), np.float32), "expected_survival": np.zeros((3, 16), np.float32)}

    def explorations(backlog: list[int]) -> list[int]:
        policy = make_policy(EstimatorSettings.model_validate({}), CostModel(CURVES))
        blocks = (_block(**hopeless, backlog=np.array(backlog), step=step) for step in range(2000))
        counts: list[int] = np.sum([policy.decide(block).explores_next for block in blocks], axis=0).tolist()
        return counts

    first, second, third = explorations([NEAR_TOKENS, 0, 5])
    assert min(first, second, third) > 0
    first, second, third = explorations([300, 200, UNKNOWN_BACKLOG])
    assert first == third == 0 < second < sum(explorations([0, 0, 0]))
    assert explorations([UNKNOWN_BACKLOG] * 3) == [0, 0, 0]


def test_rows_that_must_catch_up_first_are_planned_to_draft_only_if_that_pays() -> None:
    middling = survival(np.full((64, 7), 0.5, dtype=np.float32))
    curves = {**CURVES, DRAFT_PREFILL: CostCurve((1, 3, 100), (1.0, 1.1, 1000.0))}

    def depth(lacking_tokens: int) -> int:
        policy = make_policy(EstimatorSettings.model_validate({}), CostModel(curves))
        return policy.decide(_block(recent_survival=middling, backlog=np.full(3, lacking_tokens))).depth

    assert depth(UNKNOWN_BACKLOG) == depth(0) > 0
    assert depth(1) > 0 == depth(100) == depth(1000)


@pytest.mark.parametrize("share", [0.003, 0.02, 0.1])
def test_exploration_takes_its_share_of_the_time(share: float) -> None:
    costs = CostModel(CURVES)
    policy = make_policy(EstimatorSettings.model_validate({"exploration_share": share}), costs)
    hopeless = {"recent_survival": np.zeros((64, 7), np.float32), "expected_survival": np.zeros((3, 16), np.float32)}
    explorations = sum(policy.decide(_block(**hopeless, step=step)).explores_next.sum() for step in range(4000))
    plain_ms, deeper_ms = costs.all_verify_ms(np.array([3, 3 + EXPLORED_BEYOND_PLAN]))
    extra_ms = deeper_ms - plain_ms + costs.draft_ms(1, 1, EXPLORED_BEYOND_PLAN)
    spent = explorations * extra_ms / (4000 * plain_ms)
    assert 0.6 * share < spent <= share


def test_exploration_is_more_frequent_while_nothing_is_known() -> None:
    policy = make_policy(EstimatorSettings.model_validate({}), CostModel(CURVES))

    def explorations(cold: bool) -> int:
        return sum(policy.decide(_block(step=step, cold=cold)).explores_next.sum() for step in range(4000))

    assert explorations(cold=True) == pytest.approx(COLD_FACTOR * explorations(cold=False), rel=0.2)


def test_exploration_can_be_turned_off() -> None:
    policy = make_policy(EstimatorSettings.model_validate({"exploration_share": 0}), CostModel(CURVES))
    assert not any(policy.decide(_block(step=step, cold=True)).explores_next.any() for step in range(1000))


def test_what_much_comes_of_makes_time_dear_and_what_little_comes_of_makes_it_cheap() -> None:
    """A present step's drafts must bring what the time brought in the steps before, not what it brings now."""
    costs = CostModel({**CURVES, VERIFY: CostCurve((1, 14), (10.0, 40.0))})

    def budget_after(survivals: float) -> int:
        policy = make_policy(EstimatorSettings.model_validate({}), costs)
        free = {"looked_up": np.ones(3, bool), "survival": np.full((3, 4), survivals, np.float32)}
        for step in range(100):
            policy.decide(_block(**free, step=step))
        return policy.decide(_block(expected_survival=SPREAD)).budget

    assert 0 < budget_after(1.0) < budget_after(0.0) < 11


def test_sunk_drafting_does_not_change_what_is_verified() -> None:
    dear = {**CURVES, DRAFT_PREFILL: CostCurve((1, 64), (200.0, 210.0)), VERIFY: CostCurve((1, 14), (10.0, 40.0))}
    cheap = {**dear, DRAFT_PREFILL: CostCurve((1, 64), (1e-6, 2e-6))}
    policies = [make_policy(EstimatorSettings.model_validate({}), CostModel(curves)) for curves in (dear, cheap)]
    dear_budget, cheap_budget = (policy.decide(_block()).budget for policy in policies)
    assert 0 < dear_budget == cheap_budget


def test_longer_contexts_make_drafts_no_dearer_but_time() -> None:
    """The slower a step is without drafts, the less is lost by some."""
    costs = CostModel({**CURVES, VERIFY: CostCurve((1, 14), (10.0, 40.0)), VERIFY_CONTEXT: CostCurve((0, 1), (1, 2))})
    blocks = [_block(expected_survival=SPREAD, context_tokens=tokens) for tokens in (0, 10, 300)]
    budgets = [make_policy(EstimatorSettings.model_validate({}), costs).decide(block).budget for block in blocks]
    assert 0 < budgets[0] < budgets[1] < budgets[2] == 11


def test_a_models_depth_is_planned_for_the_rows_it_usually_drafts() -> None:
    """What is worth a forward of the drafter for all rows is not for the few that are not looked up."""

    def depth(looked_up: list[bool], then: list[bool] | None = None) -> int:
        settings = EstimatorSettings.model_validate({"exploration_share": 0})
        policy = make_policy(settings, CostModel(CURVES))
        hopeless = {"survival": np.zeros((3, 4), np.float32), "expected_survival": np.zeros((3, 16), np.float32)}
        for step in range(400):
            policy.decide(_block(**hopeless, looked_up=np.array(looked_up), step=step))
        return policy.decide(_block(**hopeless, looked_up=np.array(then or looked_up), step=400)).depth

    none, most = [False] * 3, [True, True, False]
    assert depth(most) < depth(none)
    assert depth(most, then=none) == depth(most), "one step says little about the next"


def test_the_depth_is_planned_for_the_followed_rows_and_besides_as_if_all_were() -> None:
    policy = make_policy(EstimatorSettings.model_validate({}), CostModel(CURVES))
    nothing = {"survival": np.zeros((3, 4), np.float32)}
    all_are = policy.decide(_block(**nothing))
    assert all_are.depth == all_are.depth_of_all
    one_is = policy.decide(_block(**nothing, followed=np.array([False, True, False])))
    assert one_is.depth < one_is.depth_of_all == all_are.depth


def test_prompts_make_drafting_dear_for_they_must_be_drafted_from_too() -> None:
    middling = survival(np.full((64, 7), 0.5, dtype=np.float32))
    curves = {**CURVES, DRAFT_PREFILL: CostCurve((1, 3, 100), (1.0, 1.1, 100.0))}

    def depths(prompt_tokens: int) -> set[int]:
        """Of the steps without prompts, where every tenth step has so many tokens of them."""
        policy = make_policy(EstimatorSettings.model_validate({"exploration_share": 0}), CostModel(curves))
        seen = set()
        for step in range(600):
            tokens = prompt_tokens if step % 10 == 0 else 0
            depth = policy.decide(
                _block(recent_survival=middling, base_tokens=3 + tokens, prompt_tokens=tokens, step=step)
            ).depth
            if step > 500 and not tokens:
                seen.add(depth)
        return seen

    (without,), (few,), (many,) = depths(0), depths(10), depths(500)
    assert without >= few > many == 0


def test_a_threshold_keeps_what_was_looked_up_since_its_q_is_1() -> None:
    block = _block(log_odds=np.zeros((3, 4), np.float32), looked_up=np.array([False, True, False]))
    assert _decide(block=block, trim="threshold", threshold=0.9)[0] == [0, 4, 0]


def test_without_a_drafting_model_the_verifiers_curve_is_all_that_is_needed() -> None:
    costs = CostModel({VERIFY: CostCurve((1, 14), (10.0, 40.0))}, has_drafting_model=False)
    block = _block(survival=np.zeros((3, 4), np.float32), expected_survival=np.zeros((3, 16), np.float32))
    looked_up = dataclasses.replace(block, looked_up=np.ones(3, bool))
    assert _decide(costs, looked_up)[0] == [0, 0, 0]
    assert not CostModel({VERIFY: CostCurve((1, 14), (10.0, 40.0))}).ready


def test_no_rows_are_no_problem() -> None:
    empty = _block(
        counts=np.zeros(0, np.int64),
        log_odds=np.zeros((0, 0), np.float32),
        survival=np.zeros((0, 0), np.float32),
        looked_up=np.zeros(0, bool),
        followed=np.zeros(0, bool),
        limits=np.zeros(0, np.int64),
        expected_survival=np.zeros((0, 16), np.float32),
        exploring=np.zeros(0, bool),
        base_tokens=0,
        sampling_rows=0,
    )
    for trim in ("adaptive", "off", "fixed_length", "threshold"):
        assert _decide(CostModel(CURVES), empty, trim=trim) == ([], [])

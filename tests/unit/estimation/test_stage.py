from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.estimation.chain import CURVES, KEY, MadeChain, make_draft, make_request

from adaptive_verification.contract import FILL_ONLY, NO_LABEL, STATUS_NOT_CACHED, STATUS_OK, Draft, StepCost
from adaptive_verification.contract.costs import DraftCost
from adaptive_verification.errors import ContractError, SettingsError
from adaptive_verification.estimation.cost_model import VERIFY_CONTEXT, CostCurve, CostModel, publish_curves
from adaptive_verification.estimation.draft_counts import ACCEPTED, ADMITTED, DRAFTED
from adaptive_verification.estimation.exploration import UNKNOWN_BACKLOG
from adaptive_verification.estimation.policy import Block, Decision
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings


def _stage(curves: Any = None, key: int | None = KEY, **settings: Any) -> EstimatorStage:
    validated = EstimatorSettings.model_validate({"calibration_half_life_steps": 0.0, **settings})
    return EstimatorStage(validated, evidence_key=key, curves=curves)


def _decided_blocks(stage: EstimatorStage, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The blocks that the stage's policy decides about from now on, as they come."""
    blocks: list[Block] = []
    decide = stage._policy.decide

    def seen(block: Block) -> Decision:
        blocks.append(block)
        return decide(block)

    monkeypatch.setattr(stage._policy, "decide", seen)
    return blocks


def _labels(stage: EstimatorStage) -> float:
    return stage.calibration.report().labels


def test_the_estimate_has_one_entry_for_each_row_in_the_contracts_types() -> None:
    estimate = _stage(CURVES).step(
        make_request([1, 2, 3], [5, 6, 7], limits=[7, 0, 3]), make_draft([[0.0] * 7, [], [1.0] * 3])
    )
    estimate.validate()
    assert estimate.num_rows == 3
    assert estimate.estimate_cost.numel() == 1
    assert (estimate.admitted_count <= torch.tensor([7, 0, 3])).all()


def test_accepted_drafts_and_the_first_rejected_are_labels_and_nothing_else_is() -> None:
    stage = _stage(trim="fixed_length", fixed_length=3)
    drafts = make_draft([[0.0] * 5] * 4)
    stage.step(make_request([1, 2, 3, 4], [5] * 4, limits=[5] * 4), drafts)
    # All 3 admitted accepted: 3 labels; 1: 2 labels; 0: 1 label; no label.
    accepted = [3, 1, 0, NO_LABEL]
    stage.step(make_request([1, 2, 3, 4], [9, 7, 6, 6], limits=[5] * 4, accepted=accepted), drafts)
    assert _labels(stage) == 6
    assert stage.calibration.report().acceptance_rate == pytest.approx(4 / 6)
    assert stage.counts.by_position[DRAFTED, :6].tolist() == [8, 8, 8, 8, 8, 0]
    assert stage.counts.by_position[ADMITTED, :6].tolist() == [8, 8, 8, 0, 0, 0]
    assert stage.counts.by_position[ACCEPTED, :6].tolist() == [2, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("key", [None, KEY + 1])
def test_a_foreign_caller_is_served_but_teaches_nothing(key: int | None) -> None:
    stage = _stage(CURVES, refit_interval=1)
    chain = MadeChain(stage, rows=4)
    for _ in range(10):
        estimate, _ = chain.step(key=key)
        assert estimate.num_rows == 4
    assert _labels(stage) == 0
    assert stage.fit.refits == 0
    assert stage.costs.state_dict() == _stage(CURVES).costs.state_dict()


def test_a_stage_without_a_key_believes_nobody() -> None:
    assert not _stage(key=None).trusts(make_request([1], [5], limits=[1]))
    assert not _stage(key=None).trusts(make_request([1], [5], limits=[1], key=None))


def test_foreign_evidence_is_taken_out_before_requests_are_merged() -> None:
    stage = _stage()
    foreign = make_request([1], [5], limits=[1], accepted=[1], key=KEY + 1)
    assert stage.without_foreign_evidence(foreign).previous_accepted.tolist() == [NO_LABEL]
    trusted = make_request([1], [5], limits=[1], accepted=[1])
    assert stage.without_foreign_evidence(trusted) is trusted


def test_a_step_that_is_sent_again_does_not_count_twice() -> None:
    stage = _stage(trim="off")
    drafts = make_draft([[0.0] * 3])
    stage.step(make_request([1], [5], limits=[3]), drafts)
    labelled = make_request([1], [8], limits=[3], accepted=[2], token_count=[3])
    stage.step(labelled, drafts)
    assert _labels(stage) == 3
    stage.step(labelled, drafts)
    resent = make_request([1], [8], limits=[3], accepted=[2], token_count=[8])  # the whole sequence, after STATUS 1
    stage.step(resent, drafts)
    assert _labels(stage) == 3
    stage.step(make_request([1], [9], limits=[3], accepted=[0]), drafts)  # the retried step's own label
    assert _labels(stage) == 4


@pytest.mark.parametrize(
    ("confirmed", "accepted"),
    [(9, 2), (7, 2), (9, 4), (5, 0)],
    ids=["grown too far", "too little", "more than admitted", "not grown"],
)
def test_a_label_that_contradicts_the_sequence_is_ignored(confirmed: int, accepted: int) -> None:
    stage = _stage(trim="off")
    drafts = make_draft([[0.0] * 3])
    stage.step(make_request([1], [5], limits=[3]), drafts)
    stage.step(make_request([1], [confirmed], limits=[3], accepted=[accepted], token_count=[3]), drafts)
    assert _labels(stage) == 0


def test_a_released_sequence_gives_no_label_and_is_forgotten() -> None:
    stage = _stage(trim="off")
    stage.step(make_request([1], [5], limits=[3]), make_draft([[0.0] * 3]))
    stage.step(make_request([2], [5], limits=[0], release=[1]), make_draft([[]]))
    stage.step(make_request([1], [7], limits=[0], accepted=[1]), make_draft([[]]))
    assert _labels(stage) == 0


def test_memory_is_bounded_and_the_least_recently_used_sequence_loses_its_label() -> None:
    stage = _stage(trim="off", max_sequences=2)
    for sequence in (1, 2, 3):
        stage.step(make_request([sequence], [5], limits=[1]), make_draft([[0.0]]))
    stage.step(make_request([1, 3], [7, 7], limits=[0, 0], accepted=[1, 1]), make_draft([[], []]))
    assert _labels(stage) == 1


def test_rows_that_fill_have_no_drafts_or_are_not_cached_pass_through() -> None:
    stage = _stage(CURVES)
    request = make_request(
        [1, 2, 3, 4], [5, 5, 5, 5], limits=[FILL_ONLY, 0, 7, 7], token_count=[5, 1, 1, 1], accepted=[NO_LABEL, 0, 0, 0]
    )
    estimate = stage.step(request, make_draft([[], [], [], [0.0] * 7], status=[0, 0, STATUS_NOT_CACHED, STATUS_OK]))
    assert estimate.admitted_count.tolist()[:3] == [0, 0, 0]
    assert _labels(stage) == 0


def test_a_step_without_rows_and_one_without_drafts_are_no_problem() -> None:
    stage = _stage(CURVES, refit_interval=1)
    assert stage.step(make_request([], [], limits=[]), make_draft([])).num_rows == 0
    assert stage.step(make_request([1], [5], limits=[0]), make_draft([[]])).admitted_count.tolist() == [0]
    assert all(map(math.isfinite, [*stage.fit.shared.tolist(), *stage.fit.intercepts.tolist()]))


@pytest.mark.parametrize("feature", ["logit_q_max", "gumbel_q_max", "log_q_max", "q_max_unfitted", "drafter_score"])
def test_log_odds_that_are_no_numbers_leave_everything_finite(feature: str) -> None:
    stage = _stage(CURVES, feature=feature, refit_interval=1)
    bad = make_draft([[math.nan, math.inf, -math.inf], [1e30, -1e30, 0.0]])
    confirmed = 5
    for accepted in ([NO_LABEL] * 2, [1, 0], [0, 0], [1, 1]):
        stage.step(make_request([1, 2], [confirmed, confirmed], limits=[3, 3], accepted=accepted), bad)
        confirmed += 1
    assert all(map(math.isfinite, [*stage.fit.shared.tolist(), *stage.fit.intercepts.tolist()]))
    assert (stage.calibration.report().log_loss or 0) < 50


def test_drafts_deeper_than_the_estimator_knows_are_never_admitted() -> None:
    estimate = _stage(trim="off", max_draft_tokens=2).step(
        make_request([1, 2], [5, 5], limits=[4, 1]), make_draft([[9.0] * 4, [9.0]])
    )
    assert estimate.admitted_count.tolist() == [2, 1]


def test_a_ragged_batch_is_scored_row_by_row() -> None:
    rows = [[3.0, -1.0], [], [0.5], [2.0, 2.0, -5.0]]
    threshold = _stage(trim="threshold", threshold=0.5)
    estimate = threshold.step(make_request([1, 2, 3, 4], [5] * 4, limits=[3] * 4), make_draft(rows))
    assert estimate.admitted_count.tolist() == [1, 0, 1, 2]


def test_the_fit_finds_the_coefficients_of_the_traffic_through_the_whole_stage() -> None:
    stage = _stage(trim="off", evidence="none")
    chain = MadeChain(stage, rows=32, most_drafts=4)
    for _ in range(600):
        chain.step()
    assert stage.fit.shared.item() == pytest.approx(0.8, abs=0.05)
    np.testing.assert_allclose(stage.fit.intercepts[:2].numpy(), 0.1, atol=0.2)
    fresh_calibration = stage.calibration.report()
    assert (fresh_calibration.calibration_error or 1) < 0.03


def test_a_fit_on_what_the_drafter_measured_finds_its_coefficients() -> None:
    """The features are the log-odds minus 2, so the intercepts are higher by twice the slope."""
    stage = _stage(trim="off", evidence="none", feature="entropy")
    chain = MadeChain(stage, rows=32, most_drafts=4, with_features=True)
    for _ in range(600):
        chain.step()
    assert stage.fit.shared.item() == pytest.approx(0.8, abs=0.05)
    np.testing.assert_allclose(stage.fit.intercepts[:2].numpy(), 0.1 + 1.6, atol=0.25)


def test_a_feature_that_the_drafter_does_not_send_is_an_error_that_says_what_to_set() -> None:
    stage = _stage(feature="entropy")
    request = make_request([1], [5], limits=[3])
    with pytest.raises(ContractError, match=r"feature='entropy' needs DRAFT_FEATURES.*draft_features to all"):
        stage.step(request, make_draft([[0.0] * 3]))
    assert stage.step(request, make_draft([[0.0] * 3], with_features=True)).num_rows == 1
    assert stage.step(make_request([2], [5], limits=[0]), make_draft([[]])).num_rows == 1


def test_features_that_are_not_the_contracts_are_refused() -> None:
    draft = dataclasses.replace(make_draft([[0.0] * 3]), draft_features=torch.zeros(6))
    with pytest.raises(ContractError, match="DRAFT_FEATURES has 6 numbers for 3 drafts"):
        _stage().step(make_request([1], [5], limits=[3]), draft)


def test_trimming_does_not_bias_the_fit() -> None:
    stage = _stage(CURVES, evidence="none")
    chain = MadeChain(stage, rows=32, most_drafts=4)
    for _ in range(1000):
        chain.step()
    assert stage.counts.by_position[ADMITTED].sum() < 0.9 * stage.counts.by_position[DRAFTED].sum()
    assert stage.fit.shared.item() == pytest.approx(0.8, abs=0.1)
    assert stage.fit.intercepts[0].item() == pytest.approx(0.1, abs=0.25)


def test_the_requests_own_history_improves_the_prediction_where_requests_differ() -> None:
    def log_loss(evidence: str) -> float:
        stage = _stage(trim="off", evidence=evidence)
        chains = [  # one estimator, two kinds of requests
            MadeChain(stage, rows=8, intercept=intercept, seed=seed, first_id=100 * seed)
            for seed, intercept in enumerate((1.5, -1.5))
        ]
        for _ in range(300):
            for chain in chains:
                chain.step()
        return stage.calibration.report().log_loss or math.nan

    assert log_loss("history") < log_loss("none") - 0.03


def test_the_budget_of_a_block_rests_on_the_previous_block_of_its_sequences() -> None:
    hopeful, hopeless = [[8.0] * 4] * 8, [[-8.0] * 4] * 8

    def budget_after(first: list[list[float]], second: list[list[float]]) -> int:
        stage = _stage(CURVES)
        ids, limits = list(range(8)), [4] * 8
        stage.step(make_request(ids, [5] * 8, limits=limits), make_draft(first))
        stage.step(make_request(ids, [6] * 8, limits=limits), make_draft(second))
        return stage.last_budget

    assert budget_after(hopeful, hopeless) == budget_after(hopeful, hopeful) == 32
    assert budget_after(hopeless, hopeful) == budget_after(hopeless, hopeless) == 0


def test_without_cost_curves_everything_is_drafted_and_verified() -> None:
    chain = MadeChain(_stage(), rows=4)
    for _ in range(20):
        estimate, limits = chain.step()
        assert estimate.admitted_count.tolist() == limits == [7] * 4


def test_drafts_that_never_pay_are_given_up_and_taken_up_again_when_they_do() -> None:
    chain = MadeChain(_stage(CURVES, evidence="none"), rows=16, mean_log_odds=-6.0)

    def drafted_per_step(steps: int) -> float:
        return sum(sum(chain.step()[1]) for _ in range(steps)) / steps

    drafted_per_step(400)
    hopeless = drafted_per_step(320)
    assert 0 < hopeless < 0.3  # only the exploration
    chain.mean_log_odds = 3.0
    drafted_per_step(1200)  # the rows have gone on for long without drafting, and all of that must be computed first
    assert drafted_per_step(100) > 32


def test_a_noisy_neighbour_does_not_turn_drafting_off_for_good() -> None:
    chain = MadeChain(_stage(CURVES), rows=8, mean_log_odds=2.0)

    def drafted_per_step(steps: int) -> float:
        return sum(sum(chain.step()[1]) for _ in range(steps)) / steps

    drafted_per_step(300)
    before = drafted_per_step(100)
    chain.slowness = 10.0
    drafted_per_step(200)
    chain.slowness = 1.0
    drafted_per_step(600)
    assert drafted_per_step(100) > 0.8 * before > 8


def test_costs_are_learned_from_live_steps() -> None:
    stage = _stage(CURVES)
    chain = MadeChain(stage, rows=8, slowness=2.0)
    for _ in range(300):
        chain.step()
    before = CostModel(CURVES)
    assert stage.costs.verify_ms(20) - stage.costs.other_ms == pytest.approx(2 * before.verify_ms(20), rel=0.1)


def test_a_steps_cost_belongs_to_the_context_that_its_trusted_caller_had() -> None:
    context_tokens = 1000
    stage = _stage({**CURVES, VERIFY_CONTEXT: CostCurve((0, 100), (1.0, 2.0))})  # 10 ms of them
    fresh = stage.costs.verify_ms(1)
    cost = StepCost(DraftCost.nothing(), 1.0, fresh + 10.0, 1, 1)
    for step in range(100):
        own = make_request([1], [context_tokens], limits=[0], cost=cost if step else None)
        stage.step(own, make_draft([[]]))
        foreign = make_request([2], [5], limits=[0], key=KEY + 1, cost=cost)
        stage.step(foreign, make_draft([[]]))
    assert stage.costs.verify_ms(1) - stage.costs.other_ms == pytest.approx(fresh, rel=1e-3)


def test_the_time_beside_the_stages_is_learned_from_the_clock() -> None:
    ticks = itertools.count()
    stage = EstimatorStage(
        EstimatorSettings.model_validate({"trim": "off"}),
        evidence_key=KEY,
        curves=CURVES,
        clock=lambda: next(ticks) // 2 * 1.0,
    )  # a second passes between two steps, none within one
    chain = MadeChain(stage, rows=1, most_drafts=1)
    for _ in range(3):
        chain.step()
    assert 0.0 < stage.costs.other_ms < 1000.0


def test_a_restart_continues_where_it_stopped(tmp_path: Path) -> None:
    publish_curves(tmp_path, "verifier", {"verify": CURVES["verify"]})
    publish_curves(tmp_path, "drafter", {name: CURVES[name] for name in ("draft_prefill", "draft_extend")})
    stage = _stage(state_directory=str(tmp_path), refit_interval=10)
    chain = MadeChain(stage, rows=8, lookup_share=0.3)
    for _ in range(55):
        chain.step()
    assert stage.costs.ready
    stage.close()
    again = _stage(state_directory=str(tmp_path), refit_interval=10)
    assert again.state_dict() == stage.state_dict()
    assert again.fit.refits == 5
    json.dumps(again.state_dict(), allow_nan=False)


def test_another_drafters_state_is_not_used_and_not_lost(tmp_path: Path) -> None:
    stage = _stage(state_directory=str(tmp_path), drafter="first-layers:6")
    stage.step(make_request([1], [5], limits=[1]), make_draft([[0.0]]))
    stage.close()
    other = _stage(state_directory=str(tmp_path), drafter="first-layers:8")
    assert other.steps == 0
    assert (tmp_path / "estimator.foreign.json").exists()


@pytest.mark.parametrize(
    "part", ["fit", "costs", "calibration", "expectation", "steps", "counts", "lookup_rates", "looked_up_counts"]
)
@pytest.mark.parametrize("damage", [None, {}, [], "x", {"index": 3}])
def test_a_state_damaged_in_any_part_starts_cold_and_whole(tmp_path: Path, part: str, damage: Any) -> None:
    stage = _stage(CURVES, state_directory=str(tmp_path), refit_interval=1)
    chain = MadeChain(stage, rows=2)
    for _ in range(3):
        chain.step()
    stage.close()
    content = json.loads((tmp_path / "estimator.json").read_text())
    content["state"][part] = damage
    (tmp_path / "estimator.json").write_text(json.dumps(content))
    cold = _stage(state_directory=str(tmp_path), refit_interval=1)
    assert cold.state_dict() == _stage(refit_interval=1).state_dict()
    assert (tmp_path / "estimator.damaged.json").exists()


@pytest.mark.parametrize("feature", ["logit_q_drawn", "gumbel_q_drawn", "nonsense"])
def test_serving_refuses_a_feature_that_it_cannot_trim_by(feature: str) -> None:
    with pytest.raises(SettingsError, match=feature):
        _stage(feature=feature)


# --- looked-up drafts


def _looked_up(counts: list[int], match_length: list[int]) -> Draft:
    return make_draft([[0.0] * count for count in counts], match_length=match_length)


def test_looked_up_drafts_are_predicted_from_what_became_of_earlier_ones_and_teach_the_fit_nothing() -> None:
    stage, untaught = _stage(trim="off", refit_interval=1), _stage(refit_interval=1)
    confirmed = [5, 5]
    accepted = [NO_LABEL, NO_LABEL]
    for _ in range(30):
        stage.step(
            make_request([1, 2], confirmed, limits=[3, 3], accepted=accepted), _looked_up([3, 3], match_length=[4, 16])
        )
        accepted = [0, 3]
        confirmed = [confirmed[0] + 1, confirmed[1] + 4]
    short, long = stage.lookup_rates.predict(np.array([4, 16]))[:, :3]
    assert short[0] < 0.3 < 0.9 < long.min()
    assert short[1] == pytest.approx(0.75)  # never decided
    assert stage.fit.shared.tolist() == untaught.fit.shared.tolist()
    assert stage.fit.intercepts.tolist() == untaught.fit.intercepts.tolist()
    assert _labels(stage) == 0
    assert stage._memory.residual_sum[stage._memory.slots([1, 2])[0]].tolist() == [0.0, 0.0]
    assert stage._expectation.state_dict() == untaught._expectation.state_dict()
    assert stage.counts.looked_up.tolist() == [180, 180, 87]
    assert stage.counts.by_position.sum(1).tolist() == [180, 180, 87]


def test_a_sequence_that_changes_between_lookup_and_model_teaches_each_its_own() -> None:
    """The same steps with the looked-up blocks' rows drafting nothing teach the fit the same."""

    def taught(with_lookup: bool) -> EstimatorStage:
        stage = _stage(trim="off", refit_interval=7)
        confirmed, accepted = 5, NO_LABEL
        for step in range(40):
            looked_up = step % 3 == 1
            if not looked_up:
                draft = make_draft([[1.0, -1.0, 0.5 * (step % 5)]])
            elif with_lookup:
                draft = _looked_up([3], match_length=[8])
            else:
                draft = make_draft([[]])
            stage.step(make_request([1], [confirmed], limits=[3], accepted=[accepted], token_count=[1]), draft)
            accepted = step % 4 if not looked_up or with_lookup else 0
            confirmed += accepted + 1
        return stage

    with_lookup, without = taught(True), taught(False)
    assert with_lookup.fit.state_dict() == without.fit.state_dict()
    assert with_lookup.calibration.state_dict() == without.calibration.state_dict()
    assert with_lookup.lookup_rates.state_dict() != without.lookup_rates.state_dict()


def test_the_budget_of_a_looked_up_block_rests_on_its_own_match() -> None:
    """It was known before anything was drawn; the sequence's last block of the model says nothing of it."""
    stage = _stage(CURVES)
    ids, limits = list(range(8)), [4] * 8
    for _ in range(30):
        labels = np.zeros((8, 16), np.float32)
        stage.lookup_rates.fold(np.full(8, 4), labels, 1 - labels)
        stage.lookup_rates.fold(np.full(8, 32), 1 - labels, 1 - labels)
    stage.step(make_request(ids, [5] * 8, limits=limits), make_draft([[-8.0] * 4] * 8))
    stage.step(make_request(ids, [6] * 8, limits=limits), _looked_up([4] * 8, [4] * 8))
    assert stage.last_budget == 0
    stage.step(make_request(ids, [7] * 8, limits=limits), _looked_up([4] * 8, [32] * 8))
    assert stage.last_budget == 32
    stage.step(make_request(ids, [8] * 8, limits=limits), make_draft([[8.0] * 4] * 8))
    assert stage.last_budget == 0  # the model's last block was hopeless


def test_looked_up_drafts_go_as_deep_as_the_caller_asks_whatever_is_advised_for_the_model() -> None:
    chain = MadeChain(_stage(CURVES, evidence="none"), rows=16, mean_log_odds=-6.0, lookup_share=0.5)
    for _ in range(400):
        chain.step()
    stage = chain.stage
    before = stage.counts.looked_up.copy()
    models = sum(sum(chain.step()[1]) for _ in range(100))
    drafted, admitted, accepted = stage.counts.looked_up - before
    assert stage.last_depth == 0
    assert models < 0.1 * drafted
    assert drafted == pytest.approx(100 * 16 * 0.5 * 7, rel=0.1)
    assert admitted > 0.8 * drafted
    assert accepted > 0.5 * admitted


def test_the_budget_counts_the_models_slots_to_its_own_limit() -> None:
    """A cap that the model may not draft to is no slot to fill: the budget is that of the limit alone."""

    def budget(limits: list[int], model_limits: list[int]) -> int:
        stage = _stage({**CURVES, "verify": CostCurve((1, 64), (10.0, 74.0))})
        for confirmed in (5, 6):
            request = make_request([1, 2], [confirmed] * 2, limits=limits, model_limits=model_limits)
            stage.step(request, make_draft([[8.0] * 2] * 2))
        return stage.last_budget

    assert budget([7, 7], [2, 2]) == budget([2, 2], [2, 2]) == 4


def test_a_state_from_before_drafts_were_looked_up_is_loaded(tmp_path: Path) -> None:
    stage = _stage(CURVES, state_directory=str(tmp_path), refit_interval=1)
    chain = MadeChain(stage, rows=2)
    for _ in range(3):
        chain.step()
    stage.close()
    content = json.loads((tmp_path / "estimator.json").read_text())
    del content["state"]["lookup_rates"], content["state"]["looked_up_counts"]
    (tmp_path / "estimator.json").write_text(json.dumps(content))
    again = _stage(state_directory=str(tmp_path), refit_interval=1)
    assert again.fit.state_dict() == stage.fit.state_dict()
    assert again.counts.looked_up.tolist() == [0, 0, 0]


def test_prompt_tokens_are_all_that_no_row_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt, a prompt's end with its first token, and a row that goes on."""
    stage = _stage(CURVES)
    blocks = _decided_blocks(stage, monkeypatch)
    request = make_request([1, 2, 3], [20, 7, 30], limits=[FILL_ONLY, 2, 2], token_count=[20, 7, 1])
    stage.step(request, make_draft([[], [0.0, 0.0], [0.0, 0.0]]))
    assert (blocks[0].base_tokens, blocks[0].prompt_tokens) == (28, 26)


def test_a_rows_backlog_is_what_was_confirmed_since_a_model_drafted_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = _stage(CURVES)
    blocks = _decided_blocks(stage, monkeypatch)
    ids, limits = [1, 2, 3, 4], [7, 7, 7, 0]
    stage.step(
        make_request(ids, [10] * 4, limits=limits), make_draft([[0.0], [], [0.0], []], match_length=[0, 0, 4, 0])
    )
    stage.step(make_request(ids, [12] * 4, limits=limits), make_draft([[], [0.0], [], []]))
    # drafted at 10, now at 12; never drafted but now; only ever looked up; asks for none
    assert [block.backlog.tolist() for block in blocks] == [[0, 10, 10, UNKNOWN_BACKLOG], [2, 0, 12, UNKNOWN_BACKLOG]]


def test_a_new_sequence_in_a_forgotten_ones_place_has_its_whole_text_as_backlog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = _stage(CURVES, max_sequences=1)
    blocks = _decided_blocks(stage, monkeypatch)
    stage.step(make_request([1], [10], limits=[7]), make_draft([[0.0]]))
    stage.step(make_request([2], [30], limits=[7]), make_draft([[]]))
    assert [block.backlog.tolist() for block in blocks] == [[0], [30]]

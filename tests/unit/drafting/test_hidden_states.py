"""The hidden-state drafter in the loop: which states reach it, when it drafts, and that the text stays the target's."""

from __future__ import annotations

import pytest
import torch
from tests.enumeration import Enumerator
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions, state_after
from tests.table_states_model import TableStatesModel
from tests.unit.test_lossless import PROMPTS, Tokens, assert_distributed_by

from adaptive_verification.contract import (
    FILL_ONLY,
    NOT_FOLLOWED,
    Draft,
    Estimate,
    LocalStep,
    StepCost,
    StepRequest,
    StepResult,
)
from adaptive_verification.contract.hidden_states import NO_STATES, RowStates, of_rows
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.errors import ContractError
from adaptive_verification.verification.stage import VerifierStage

VOCAB_SIZE = 7
P, Q = random_distributions(VOCAB_SIZE, seed=1), random_distributions(VOCAB_SIZE, seed=2)


class AdmitAll:
    """Follows every sequence but those that it is told not to."""

    def __init__(self) -> None:
        self.not_followed: set[int] = set()

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        followed = torch.tensor([int(i) not in self.not_followed for i in request.sequence_id])
        next_limit = draft.drafted_count.where(followed, torch.tensor(NOT_FOLLOWED, dtype=torch.int32))
        return Estimate(draft.drafted_count, next_limit, torch.zeros(1))


class Loop:
    """Greedy sequences over both stages, driven as a caller drives them."""

    def __init__(self, max_catch_up_tokens: int = 100) -> None:
        self.drafter = TableStatesModel(VOCAB_SIZE, Q, token_ids=[0, 2, 3, 6])
        self.stage = CausalDrafter(
            self.drafter,
            target_vocab_size=VOCAB_SIZE,
            idle_seconds=60,
            draft_top_k=4,
            max_catch_up_tokens=max_catch_up_tokens,
        )
        target = TableModel(VOCAB_SIZE, P, hidden_layers=(1,))
        verifier = VerifierStage(target, idle_seconds=60)  # type: ignore[arg-type]
        self.estimator = AdmitAll()
        self.step = LocalStep(self.stage, self.estimator, verifier)
        self.tokens: dict[int, list[int]] = {}
        self.confirmed: dict[int, int] = {}
        self.states: dict[int, RowStates] = {}

    def add(self, sequence_id: int, prompt: list[int]) -> None:
        self.tokens[sequence_id], self.confirmed[sequence_id] = list(prompt), 0
        self.states[sequence_id] = NO_STATES

    def run(self, *sequence_ids: int, limit: int = 3, chunk: int | None = None, model_limit: int = 16) -> StepResult:
        rows = []
        for sequence_id in sequence_ids:
            start = self.confirmed[sequence_id]
            end = len(self.tokens[sequence_id]) if chunk is None else start + chunk
            draft_limit = limit if end == len(self.tokens[sequence_id]) else FILL_ONLY
            rows.append(
                RequestRow(
                    sequence_id,
                    start,
                    self.tokens[sequence_id][start:end],
                    draft_limit,
                    temperature=0.0,
                    hidden_states=self.states[sequence_id],
                    model_draft_limit=model_limit,
                )
            )
        result = self.step(step_request(rows))
        for row, output, states in zip(
            rows, result.output_tokens.split(result.output_count.tolist()), of_rows(result), strict=True
        ):
            self.confirmed[row.sequence_id] += len(row.tokens)
            self.tokens[row.sequence_id] += output.tolist()
            self.states[row.sequence_id] = states
        return result


def greedy(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(P(tuple(tokens)).argmax()))
    return tokens


def test_it_drafts_from_the_second_step_on_and_the_text_is_the_targets() -> None:
    loop = Loop()
    loop.add(1, [1, 2, 3])
    loop.add(2, [4, 5])
    drafted = [loop.run(1, 2).drafted_count.tolist() for _ in range(5)]
    assert drafted == [[0, 0]] + [[3, 3]] * 4
    for sequence_id, prompt in ((1, [1, 2, 3]), (2, [4, 5])):
        assert loop.tokens[sequence_id] == greedy(prompt, len(loop.tokens[sequence_id]))


def test_only_tokens_of_the_draft_vocabulary_are_drafted() -> None:
    loop = Loop()
    loop.add(1, [1])
    loop.run(1)
    row = RequestRow(1, 1, loop.tokens[1][1:], 3, temperature=1.0, hidden_states=loop.states[1])
    draft = loop.stage.step(step_request([row]))
    assert set(draft.candidate_ids.tolist()) == {0, 2, 3, 6}
    assert set(draft.draft_tokens.tolist()) <= {0, 2, 3, 6}


def test_the_states_of_prompt_chunks_are_put_together() -> None:
    loop = Loop()
    loop.add(1, [1, 2, 3, 4, 5, 6])
    while loop.confirmed[1] < 4:
        assert loop.run(1, chunk=2).output_count.tolist() == [0]
    loop.run(1)
    loop.run(1)
    assert loop.tokens[1] == greedy([1, 2, 3, 4, 5, 6], len(loop.tokens[1]))
    assert loop.drafter.num_computed_tokens > 6, "every position was computed, which checks every state"


def test_rows_come_and_go_in_any_order() -> None:
    loop = Loop()
    for sequence_id, prompt in ((1, [1, 2]), (2, [3, 4, 5]), (3, [6])):
        loop.add(sequence_id, prompt)
    for sequence_ids in ((1, 2), (2, 3, 1), (3,), (1, 3), (2, 1), (3, 2, 1)):
        loop.run(*sequence_ids)
    for sequence_id, prompt in ((1, [1, 2]), (2, [3, 4, 5]), (3, [6])):
        assert loop.tokens[sequence_id] == greedy(prompt, len(loop.tokens[sequence_id]))


def test_states_are_kept_while_no_drafts_are_wanted_and_used_afterwards() -> None:
    loop = Loop()
    loop.add(1, [1, 2, 3])
    for _ in range(4):
        assert loop.run(1, model_limit=0).drafted_count.tolist() == [0]
    assert loop.drafter.num_computed_tokens == 0
    assert loop.run(1).drafted_count.tolist() == [3]


def noted_writes(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The positions of each time that the model is given states, from now on."""
    written: list[list[int]] = []
    write = loop.drafter.write_states

    def write_and_note(slots: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        written.append(positions.tolist())
        write(slots, positions, states)

    monkeypatch.setattr(loop.drafter, "write_states", write_and_note)
    return written


def test_states_wait_until_their_sequence_is_drafted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    written = noted_writes(loop, monkeypatch)
    loop.add(1, [1, 2, 3])
    loop.add(2, [4, 5])
    for _ in range(4):
        loop.run(1, 2, model_limit=0)
    assert written == []
    assert loop.run(1).drafted_count.tolist() == [3]
    assert written == [[0, 1, 2, 3, 4, 5]]
    loop.run(1)
    assert written[1][0] == 6, "what was given is not given again"


def test_waiting_states_of_tokens_that_were_taken_back_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    written = noted_writes(loop, monkeypatch)
    waiting = RequestRow(1, 0, [1, 2, 3], 3, model_draft_limit=0, hidden_states=states(0, [(1,), (1, 2)]))
    assert drafted(loop, waiting) == [0]
    assert drafted(loop, RequestRow(1, 1, [4, 5], 3, hidden_states=states(1, [(1, 4)]))) == [3]
    assert written == [[0, 1], [1]], "of two states for one place written at once, either may stay"


def test_waiting_states_outlive_the_request_that_brought_them() -> None:
    """A server uses a request's memory again."""
    loop = Loop()
    sent = states(0, [(1,), (1, 2)])
    request = step_request([RequestRow(1, 0, [1, 2, 3], 3, model_draft_limit=0, hidden_states=sent)])
    loop.stage.step(request)
    request.previous_hidden_states.zero_()
    assert drafted(loop, RequestRow(1, 3, [4], 3, hidden_states=states(2, [(1, 2, 3)]))) == [3]


def test_a_row_that_catches_up_in_several_steps_keeps_the_targets_states() -> None:
    loop = Loop(max_catch_up_tokens=2)
    loop.add(1, [1, 2, 3, 4, 5])
    drafted = [int(loop.run(1).drafted_count) for _ in range(6)]
    assert drafted[0] == 0
    assert drafted[-1] == 3
    assert loop.tokens[1] == greedy([1, 2, 3, 4, 5], len(loop.tokens[1]))


def test_a_row_without_states_is_not_drafted_for_and_one_that_lost_some_is() -> None:
    loop = Loop()
    loop.add(1, [1, 2, 3])
    loop.run(1)
    kept, loop.states[1] = loop.states[1], NO_STATES
    assert loop.run(1).drafted_count.tolist() == [0]
    assert kept.num_states == 3
    assert loop.run(1).drafted_count.tolist() == [3]
    assert loop.tokens[1] == greedy([1, 2, 3], len(loop.tokens[1]))


def states(start: int, prefixes: list[tuple[int, ...]]) -> RowStates:
    """What a verifier would hand on after these prefixes."""
    values = torch.tensor([state_after(prefix) for prefix in prefixes])
    return RowStates(start, len(prefixes), values.view(torch.uint8))


def drafted(loop: Loop, *rows: RequestRow) -> list[int]:
    return loop.stage.step(step_request(rows)).drafted_count.tolist()


def test_a_state_of_a_token_that_is_not_followed_yet_is_not_kept() -> None:
    loop = Loop()
    too_many = states(0, [(1,), (1, 2), (1, 2, 3)])
    assert drafted(loop, RequestRow(1, 0, [1, 2], 3, hidden_states=too_many)) == [3]
    assert drafted(loop, RequestRow(1, 2, [4], 3)) == [0]


def test_states_of_a_row_that_is_refused_are_not_its_neighbours() -> None:
    loop = Loop()
    refused = RequestRow(1, 0, [VOCAB_SIZE, 2], 3, hidden_states=states(0, [(5,)]))
    row = RequestRow(2, 0, [1, 2], 3, hidden_states=states(0, [(1,)]))
    assert drafted(loop, refused, row) == [0, 3], "the model checks that the second row's states are its own"


def test_states_of_tokens_that_were_taken_back_are_forgotten() -> None:
    loop = Loop()
    assert drafted(loop, RequestRow(1, 0, [1, 2, 3], 3, hidden_states=states(0, [(1,), (1, 2)]))) == [3]
    assert drafted(loop, RequestRow(1, 1, [4, 5], 3)) == [0]
    assert drafted(loop, RequestRow(1, 1, [4, 5], 3, hidden_states=states(1, [(1, 4)]))) == [3]


def test_no_states_are_handed_on_for_rows_that_never_draft() -> None:
    loop = Loop()
    loop.add(1, [1, 2, 3])
    result = loop.run(1, limit=0)
    assert result.hidden_count.tolist() == [0]
    assert result.hidden_states.numel() == 0


def test_states_are_handed_on_of_the_followed_rows_alone() -> None:
    loop = Loop()
    loop.estimator.not_followed = {1, 3}
    for sequence_id, prompt in ((1, [1, 2]), (2, [3, 4, 5]), (3, [6])):
        loop.add(sequence_id, prompt)
    assert loop.run(1, 2, 3).hidden_count.tolist() == [0, 3, 0]
    assert [loop.run(1, 2, 3).drafted_count.tolist() for _ in range(3)] == [[0, 3, 0]] * 3
    for sequence_id, prompt in ((1, [1, 2]), (2, [3, 4, 5]), (3, [6])):
        assert loop.tokens[sequence_id] == greedy(prompt, len(loop.tokens[sequence_id]))


def test_a_sequence_that_begins_as_another_one_gets_the_states_of_its_beginning_too() -> None:
    loop = Loop()
    loop.estimator.not_followed = {1}
    prompt = [1, 2, 3, 4, 5, 6]
    loop.add(1, [*prompt, 0])
    loop.run(1)
    loop.add(2, [*prompt, 1])
    result = loop.run(2)
    cost = StepCost.from_tensor(result.step_cost)
    assert cost is not None
    assert cost.reused_tokens == 6
    assert (result.hidden_start.tolist(), result.hidden_count.tolist()) == ([0], [7])
    assert loop.run(2).drafted_count.tolist() == [3], "the drafter checks every state it computes with"
    loop.add(3, [*prompt, 2])
    loop.run(3)
    computed = loop.drafter.num_computed_tokens
    assert loop.run(3).drafted_count.tolist() == [3]
    assert loop.drafter.num_computed_tokens - computed == 2 + 2, "the drafter reuses the beginning as the target does"
    for sequence_id, last in ((2, 1), (3, 2)):
        assert loop.tokens[sequence_id] == greedy([*prompt, last], len(loop.tokens[sequence_id]))


def test_a_sequence_that_is_followed_late_gets_all_its_states() -> None:
    loop = Loop()
    loop.estimator.not_followed = {1}
    loop.add(1, [1, 2, 3])
    assert [loop.run(1).drafted_count.tolist() for _ in range(3)] == [[0]] * 3
    loop.estimator.not_followed = set()
    assert loop.run(1).hidden_start.tolist() == [0]
    assert loop.run(1).drafted_count.tolist() == [3]
    assert loop.tokens[1] == greedy([1, 2, 3], len(loop.tokens[1]))


def test_where_nobody_is_followed_nothing_is_handed_on() -> None:
    loop = Loop()
    loop.estimator.not_followed = {1}
    loop.add(1, [1, 2])
    result = loop.run(1)
    assert (result.hidden_count.tolist(), result.hidden_states.numel()) == ([0], 0)


def test_states_of_another_width_are_refused() -> None:
    row = RequestRow(1, 0, [1, 2], 3, hidden_states=RowStates(0, 1, torch.zeros(12, dtype=torch.uint8)))
    with pytest.raises(ContractError, match="PREVIOUS_HIDDEN_STATES has 12 bytes for 1 states; each state must have 4"):
        Loop().stage.step(step_request([row]))


def test_the_output_is_distributed_by_the_target_with_a_reduced_draft_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, q = random_distributions(3, seed=5), random_distributions(3, seed=6)

    def run() -> tuple[Tokens, ...]:
        step = LocalStep(
            CausalDrafter(
                TableStatesModel(3, q, token_ids=[0, 2]),
                target_vocab_size=3,
                idle_seconds=60,
                draft_top_k=4,
                max_catch_up_tokens=100,
            ),
            AdmitAll(),
            VerifierStage(TableModel(3, p, hidden_layers=(1,)), idle_seconds=60),  # type: ignore[arg-type]
        )
        tokens = [list(prompt) for prompt in PROMPTS[:1]]
        confirmed, states = [0], [NO_STATES]
        for _ in range(2):
            rows = [
                RequestRow(i, confirmed[i], tokens[i][confirmed[i] :], 2, hidden_states=states[i])
                for i in range(len(tokens))
            ]
            result = step(step_request(rows))
            confirmed, states = [len(row) for row in tokens], of_rows(result)
            for row, output in zip(tokens, result.output_tokens.split(result.output_count.tolist()), strict=True):
                row += output.tolist()
        return tuple(tuple(row[len(prompt) :]) for row, prompt in zip(tokens, PROMPTS, strict=False))

    outcomes = Enumerator(monkeypatch).outcomes(run)
    assert max(len(tokens[0]) for tokens in outcomes) == 4, "some outcome has two accepted drafts"
    assert_distributed_by(outcomes, p, 3)

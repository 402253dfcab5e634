"""What cannot be seen through the engine without waiting for something not to happen."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.generation.scripted import END_TOKEN, CollectingSink, ScriptedStep, make_request
from tokenizers import Tokenizer

from adaptive_verification.contract import COUPLED, NO_LABEL, REJECTION
from adaptive_verification.errors import StepFailed
from adaptive_verification.generation.detokenizer import Detokenizer
from adaptive_verification.generation.scheduler import Scheduler
from adaptive_verification.generation.text_stream import TextStream
from adaptive_verification.settings import GenerateSettings


def make_scheduler(settings: GenerateSettings) -> Scheduler:
    return Scheduler(settings, frozenset({END_TOKEN}), evidence_key=None)


def enqueue(scheduler: Scheduler, tokenizer: Tokenizer, max_tokens: int, **sampling: Any) -> int:
    request = make_request(max_tokens=max_tokens, **sampling)
    return scheduler.enqueue(request, TextStream(request, Detokenizer(tokenizer), CollectingSink()))


def test_a_release_that_fails_alone_is_not_tried_again(byte_tokenizer: Tokenizer, settings: GenerateSettings) -> None:
    scheduler = make_scheduler(settings)
    sequence_id = enqueue(scheduler, byte_tokenizer, max_tokens=16)
    scheduler.fail(scheduler.schedule(), StepFailed("broken"))
    release_only = scheduler.schedule()
    assert (release_only.rows, release_only.release) == ([], [sequence_id])
    scheduler.fail(release_only, StepFailed("broken"))
    assert not scheduler.has_work


def test_cancelling_what_has_ended_makes_no_work(
    byte_tokenizer: Tokenizer, settings: GenerateSettings, step: ScriptedStep
) -> None:
    scheduler = make_scheduler(settings)
    sequence_id = enqueue(scheduler, byte_tokenizer, max_tokens=1)
    for _ in range(2):
        scheduled = scheduler.schedule()
        scheduler.apply(scheduled, step(scheduler.step_request(scheduled)))
    scheduler.cancel(sequence_id)
    assert not scheduler.has_work


def test_the_time_to_the_first_token_counts_from_the_request_on(
    byte_tokenizer: Tokenizer, settings: GenerateSettings, step: ScriptedStep
) -> None:
    now = [100.0]
    scheduler = Scheduler(settings, frozenset({END_TOKEN}), evidence_key=None, clock=lambda: now[0])
    enqueue(scheduler, byte_tokenizer, max_tokens=12)
    waits = []
    while scheduler.has_work:
        now[0] += 0.25
        scheduled = scheduler.schedule()
        scheduler.apply(scheduled, step(scheduler.step_request(scheduled)))
        waits += [update.first_token_ms for update in scheduler.take_updates()]
    assert waits[0] == 250
    assert len(waits) > 1
    assert set(waits[1:]) == {None}


def test_two_schedulers_use_different_sequence_ids(byte_tokenizer: Tokenizer, settings: GenerateSettings) -> None:
    ids = {enqueue(make_scheduler(settings), byte_tokenizer, max_tokens=1) for _ in range(20)}
    assert len(ids) == 20


@pytest.mark.parametrize("deployment", ["rejection", "coupled"])
def test_only_requests_that_accept_as_the_deployment_does_teach_the_estimator(
    byte_tokenizer: Tokenizer, settings: GenerateSettings, deployment: str
) -> None:
    scheduler = make_scheduler(settings.model_copy(update={"acceptance": deployment}))
    step = ScriptedStep(settings.max_context_tokens, acceptance=deployment)
    for acceptance in ("rejection", "coupled"):
        enqueue(scheduler, byte_tokenizer, max_tokens=40, acceptance=acceptance)
    labels: list[set[int]] = [set(), set()]
    for _ in range(8):
        scheduled = scheduler.schedule()
        request = scheduler.step_request(scheduled)
        assert request.acceptance.tolist() == [REJECTION, COUPLED]
        for seen, label in zip(labels, request.previous_accepted.tolist(), strict=True):
            seen.add(label)
        scheduler.apply(scheduled, step(request))
    teaching, silent = labels if deployment == "rejection" else reversed(labels)
    assert max(teaching) > 0
    assert silent == {NO_LABEL}


def test_a_new_sequences_model_drafts_as_deep_as_the_stages_advised_the_others(
    byte_tokenizer: Tokenizer, settings: GenerateSettings, step: ScriptedStep
) -> None:
    scheduler = make_scheduler(settings)
    step.next_draft_limit = 1
    enqueue(scheduler, byte_tokenizer, max_tokens=20)
    first = scheduler.schedule()
    request = scheduler.step_request(first)
    assert request.model_draft_limit.tolist() == [settings.num_draft_tokens]
    scheduler.apply(first, step(request))
    enqueue(scheduler, byte_tokenizer, max_tokens=20)
    request = scheduler.step_request(scheduler.schedule())
    assert request.model_draft_limit.tolist() == [1, 1]
    assert request.draft_limit.tolist() == [settings.num_draft_tokens] * 2


def test_a_sequence_that_is_not_followed_drafts_with_no_model_and_advises_nobody(
    byte_tokenizer: Tokenizer, settings: GenerateSettings, step: ScriptedStep
) -> None:
    scheduler = make_scheduler(settings)
    step.next_draft_limit = 2
    ids = [enqueue(scheduler, byte_tokenizer, max_tokens=20) for _ in range(2)]
    step.not_followed = {ids[0]}
    scheduled = scheduler.schedule()
    scheduler.apply(scheduled, step(scheduler.step_request(scheduled)))
    enqueue(scheduler, byte_tokenizer, max_tokens=20)
    scheduled = scheduler.schedule()
    request = scheduler.step_request(scheduled)
    assert request.model_draft_limit.tolist() == [0, 2, 2]
    step.not_followed = set(request.sequence_id.tolist())
    scheduler.apply(scheduled, step(request))
    enqueue(scheduler, byte_tokenizer, max_tokens=20)
    request = scheduler.step_request(scheduler.schedule())
    assert request.model_draft_limit.tolist() == [0, 0, 0, 2], "the last plan that was seen"

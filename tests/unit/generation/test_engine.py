"""The engine over a scripted step: what every request gets is known exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tests.unit.generation.scripted import (
    END_TOKEN,
    FIRST_BYTE_TOKEN,
    WAIT_SECONDS,
    CollectingSink,
    ScriptedStep,
    byte_tokens,
    make_request,
    solo_output,
)

from adaptive_verification.contract.messages import FILL_ONLY, StepRequest, StepResult
from adaptive_verification.errors import ServerBusy, StepFailed
from adaptive_verification.generation.engine import Engine
from adaptive_verification.generation.response import GenerationResponse
from adaptive_verification.settings import GenerateSettings

MakeEngine = Callable[..., Engine]


class Gate:
    """Holds a step back: `reached` tells that a step has begun, `open` lets this one and all later ones go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, request: StepRequest) -> None:
        self.reached.set()
        assert self._open.wait(WAIT_SECONDS)

    def wait_until_reached(self) -> None:
        assert self.reached.wait(WAIT_SECONDS)

    def open(self) -> None:
        self._open.set()


def solo_text(prompt: str, num_tokens: int) -> str:
    return "".join(chr(token - FIRST_BYTE_TOKEN) for token in solo_output(byte_tokens(prompt), num_tokens))


def submit(engine: Engine, *args: object, **options: object) -> CollectingSink:
    sink = CollectingSink()
    engine.submit(make_request(*args, **options), sink)  # type: ignore[arg-type]
    return sink


def rows_of(request: StepRequest) -> dict[int, dict[str, int]]:
    fields = ("context_length", "token_count", "draft_limit")
    return {
        sequence_id: {name: int(getattr(request, name)[i]) for name in fields}
        for i, sequence_id in enumerate(request.sequence_id.tolist())
    }


def all_ids(step: ScriptedStep, field_name: str) -> list[int]:
    return [sequence_id for request in step.requests for sequence_id in getattr(request, field_name).tolist()]


def watch_for_release_only_step(step: ScriptedStep) -> threading.Event:
    """Is set when a step without rows releases sequences: then the engine has nothing else to do."""
    seen = threading.Event()

    def watch(request: StepRequest) -> None:
        if request.num_rows == 0 and request.release.numel():
            seen.set()

    step.before = watch
    return seen


def test_64_concurrent_requests_of_different_lengths_get_what_each_gets_alone(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings)
    prompts = ["p" * (1 + 3 * i % 70) + str(i) for i in range(64)]
    sinks = [submit(engine, prompt, max_tokens=1 + i, stream=i % 2 == 0) for i, prompt in enumerate(prompts)]
    for i, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        assert sink.wait().text == solo_text(prompt, 1 + i)
        assert sink.num_output_tokens == 1 + i
        assert sink.last.finish_reason == "length"
        assert sink.last.num_input_tokens == len(prompt)
        assert len(sink.responses) == 1 or i % 2 == 0
    assert max(request.num_rows for request in step.requests) > 1


def test_requests_beyond_the_live_bound_wait_and_are_served_in_order(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings.model_copy(update={"max_live_sequences": 3}))
    sinks = [submit(engine, f"prompt {i}", max_tokens=9) for i in range(20)]
    for i, sink in enumerate(sinks):
        assert sink.wait().text == solo_text(f"prompt {i}", 9)
    assert max(request.num_rows for request in step.requests) == 3
    first_seen = list(dict.fromkeys(all_ids(step, "sequence_id")))
    assert first_seen == sorted(first_seen)


def test_a_long_prompt_comes_in_chunks_beside_decoding_rows_and_its_last_chunk_samples_at_once(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()
    step.before = gate
    engine = make_engine(step, settings)
    short = submit(engine, "short", max_tokens=40)
    gate.wait_until_reached()
    long_prompt = "l" * 80
    long = submit(engine, long_prompt, max_tokens=5)
    gate.open()
    assert long.wait().text == solo_text(long_prompt, 5)
    assert short.wait().text == solo_text("short", 40)
    long_id = max(step.requests[1].sequence_id.tolist())
    rows = [rows_of(request)[long_id] for request in step.requests if long_id in request.sequence_id.tolist()]
    assert [row["token_count"] for row in rows[:3]] == [32, 32, 16]
    assert [row["draft_limit"] for row in rows[:3]] == [FILL_ONLY, FILL_ONLY, 4]
    assert all(request.num_rows == 2 for request in step.requests[1:4])


def test_short_prompts_share_a_steps_prompt_budget_first_come_first_served(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()
    step.before = gate
    engine = make_engine(step, settings)
    first = submit(engine, "x", max_tokens=1)
    gate.wait_until_reached()
    sinks = [submit(engine, letter * 12, max_tokens=2) for letter in "abcd"]
    gate.open()
    for letter, sink in zip("abcd", sinks, strict=True):
        assert sink.wait().text == solo_text(letter * 12, 2)
    first.wait()
    assert step.requests[1].token_count.tolist() == [12, 12, 8]
    assert (step.requests[1].draft_limit == FILL_ONLY).tolist() == [False, False, True]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()
    step.before = gate
    engine = make_engine(step, settings)
    first = submit(engine, "x", max_tokens=1)
    gate.wait_until_reached()
    sinks = [submit(engine, letter * length, max_tokens=2) for letter, length in (("a", 80), ("b", 12), ("c", 2))]
    gate.open()
    for sink in (first, *sinks):
        sink.wait()
    # half of the 32 tokens for the long one, what the short ones want, and the rest for the long one again
    assert step.requests[1].token_count.tolist() == [18, 12, 2]


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_max_tokens_is_exact_and_drafts_never_exceed_what_remains(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings, max_tokens: int
) -> None:
    engine = make_engine(step, settings)
    sink = submit(engine, "some prompt", max_tokens=max_tokens).wait()
    assert sink.num_output_tokens == max_tokens
    assert sink.text == solo_text("some prompt", max_tokens)
    for request in step.requests:
        for row in rows_of(request).values():
            done = row["context_length"] + row["token_count"] - len("some prompt")
            assert row["draft_limit"] <= max_tokens - done - 1


def test_a_text_ends_where_the_context_is_full(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings)
    sink = submit(engine, "c" * 230, max_tokens=1000).wait()
    assert sink.text == solo_text("c" * 230, settings.max_context_tokens - 230)
    assert sink.last.finish_reason == "length"


def test_no_step_asks_for_more_drafts_than_request_settings_and_stages_allow(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings.model_copy(update={"num_draft_tokens": 5}))
    for asked, most in ((0, 0), (3, 3), (9, 5)):
        step.requests.clear()
        submit(engine, "prompt", num_draft_tokens=asked, max_tokens=30).wait()
        assert max(int(request.draft_limit.max()) for request in step.requests if request.num_rows) == most
    step.next_draft_limit = 2
    step.requests.clear()
    submit(engine, "prompt", num_draft_tokens=9, max_tokens=30).wait()
    sampling = [request for request in step.requests if request.num_rows]
    assert [int(request.model_draft_limit) for request in sampling[1:]] == [2] * (len(sampling) - 1)
    assert max(int(request.draft_limit) for request in sampling) == 5


@pytest.mark.parametrize("end_token", [END_TOKEN, FIRST_BYTE_TOKEN + ord("!")])
def test_an_end_token_ends_the_text_and_is_counted_but_not_shown(
    make_engine: MakeEngine, settings: GenerateSettings, end_token: int
) -> None:
    text = byte_tokens("prompt" + "the end")

    def next_token(prefix: list[int]) -> int:
        return text[len(prefix)] if len(prefix) < len(text) else end_token

    step = ScriptedStep(settings.max_context_tokens, next_token)
    engine = make_engine(step, settings, end_token_ids=frozenset({0, end_token}))
    sink = submit(engine, "prompt", max_tokens=50).wait()
    assert (sink.text, sink.last.finish_reason, sink.num_output_tokens) == ("the end", "stop", 8)


def test_acceptance_counts_are_of_verified_drafts(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    results: list[StepResult] = []

    def recording(request: StepRequest) -> StepResult:
        results.append(step(request))
        return results[-1]

    engine = make_engine(recording, settings)
    last = submit(engine, "prompt", max_tokens=60).wait().last
    assert last.total_draft_tokens == sum(int(result.admitted_count.sum()) for result in results)
    assert last.total_accepted_draft_tokens == sum(int(r.output_count.sum()) - r.num_rows for r in results)
    assert last.total_accepted_draft_tokens is not None
    assert last.total_draft_tokens is not None
    assert last.acceptance_rate == last.total_accepted_draft_tokens / last.total_draft_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_word_ends_the_text_before_it_and_what_comes_later_changes_nothing(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings, stream: bool
) -> None:
    released = watch_for_release_only_step(step)
    engine = make_engine(step, settings)
    full = solo_text("prompt", 100)
    start = 37
    stop_word = full[start : start + 3]
    assert full.index(stop_word) == start
    sink = submit(engine, "prompt", max_tokens=240, stop_words=[stop_word], stream=stream).wait()
    assert (sink.text, sink.last.finish_reason, sink.num_output_tokens) == (full[:start], "stop", start + 3)
    assert released.wait(WAIT_SECONDS)
    assert max(int(request.context_length.max()) for request in step.requests if request.num_rows) < 240


def test_counts_do_not_depend_on_when_the_stop_word_is_noticed(
    make_engine: MakeEngine, settings: GenerateSettings
) -> None:
    fourth_step = threading.Event()

    class HeldBackSink(CollectingSink):
        """Is sent nothing until the loop has run on to the fourth step."""

        def send(self, response: GenerationResponse, *, final: bool) -> None:
            assert fourth_step.wait(WAIT_SECONDS)
            super().send(response, final=final)

    request = make_request("prompt", max_tokens=100, stop_words=[solo_text("prompt", 11)[9:]], stream=True)
    outcomes = []
    for sink in (HeldBackSink(), CollectingSink()):
        step = ScriptedStep(settings.max_context_tokens)
        requests = step.requests
        step.before = lambda _, requests=requests: fourth_step.set() if len(requests) == 4 else None  # type: ignore[misc]
        make_engine(step, settings).submit(request, sink)
        sink.wait()
        outcomes.append((sink.text, sink.num_output_tokens, sink.last[4:]))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == 11


def test_the_echoed_prompt_comes_once_and_stop_words_do_not_look_at_it(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings)
    for stream in (False, True):
        sink = submit(engine, "prompt", echoed_text="prompt", stop_words=["prompt"], stream=stream).wait()
        assert sink.text == "prompt" + solo_text("prompt", 16)


def test_characters_of_many_tokens_are_never_split_in_a_stream(
    make_engine: MakeEngine, settings: GenerateSettings
) -> None:
    text = "日本語 e\u0301 🧑\u200d🚀 नमस्ते 🇫🇷!"
    tokens = byte_tokens("prompt" + text)

    def next_token(prefix: list[int]) -> int:
        return tokens[len(prefix)] if len(prefix) < len(tokens) else END_TOKEN

    engine = make_engine(ScriptedStep(settings.max_context_tokens, next_token), settings)
    sink = submit(engine, "prompt", max_tokens=200, stream=True).wait()
    assert sink.text == text
    assert all("\ufffd" not in response.text_output for response in sink.responses)
    assert len(sink.responses) > 1
    cut = submit(engine, "prompt", max_tokens=2, stream=True).wait()
    assert cut.text == "\ufffd", "an incomplete character at the end is shown as decode() shows it"


def test_a_cancelled_client_frees_its_place_and_the_others_go_on(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings.model_copy(update={"max_live_sequences": 2}))
    leaving = submit(engine, "leaving", max_tokens=240, stream=True)
    staying = submit(engine, "staying", max_tokens=240)
    waiting = submit(engine, "waiting", max_tokens=10)
    leaving.wait_for_first().cancelled = True
    leaving.wait()
    assert leaving.last.finish_reason == "cancelled"
    assert waiting.wait().text == solo_text("waiting", 10)
    assert staying.wait().text == solo_text("staying", 240)


def test_a_waiting_request_can_be_cancelled(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()
    step.before = gate
    engine = make_engine(step, settings.model_copy(update={"max_live_sequences": 1}))
    first = submit(engine, "first")
    gate.wait_until_reached()
    sink = CollectingSink()
    sequence_id = engine.submit(make_request("second"), sink)
    engine.cancel(sequence_id)
    gate.open()
    assert sink.wait().last.finish_reason == "cancelled"
    assert first.wait().text == solo_text("first", 16)
    assert sequence_id not in all_ids(step, "sequence_id") + all_ids(step, "release")


def test_every_ended_sequence_is_released_even_if_nothing_follows(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    released = watch_for_release_only_step(step)
    engine = make_engine(step, settings)
    sinks = [submit(engine, f"prompt {i}", max_tokens=1 + i) for i in range(5)]
    for sink in sinks:
        sink.wait()
    assert released.wait(WAIT_SECONDS)
    engine.close()
    assert step.caches == {}
    assert step.requests[-1].num_rows == 0


def test_a_failed_step_ends_only_its_own_sequences_and_the_loop_goes_on(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()

    def fail_once(request: StepRequest) -> None:
        gate(request)
        if len(step.requests) == 3:
            raise RuntimeError("secret detail")

    step.before = fail_once
    engine = make_engine(step, settings.model_copy(update={"max_live_sequences": 2}))
    failing = [submit(engine, f"failing {i}", max_tokens=100) for i in range(2)]
    gate.wait_until_reached()
    waiting = submit(engine, "waiting")
    gate.open()
    for sink in failing:
        assert isinstance(sink.wait().error, StepFailed)
        assert "secret detail" not in str(sink.error)
    assert waiting.wait().text == solo_text("waiting", 16)
    failed, following = step.requests[2:4]
    assert set(failed.sequence_id.tolist()) <= set(following.release.tolist())
    assert following.previous_cost.numel() == 0


def test_what_a_failed_step_should_have_released_is_released_by_the_next(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()

    def fail_second(request: StepRequest) -> None:
        gate(request)
        if len(step.requests) == 2:
            raise StepFailed("broken")

    step.before = fail_second
    engine = make_engine(step, settings)
    first = submit(engine, "first", max_tokens=1)
    gate.wait_until_reached()
    second = submit(engine, "second")
    gate.open()
    assert first.wait().error is None
    assert second.wait().error is not None
    engine.close()
    assert step.requests[1].release.tolist() == step.requests[0].sequence_id.tolist()
    assert sorted(step.requests[2].release.tolist()) == sorted(set(all_ids(step, "sequence_id")))


def test_the_reason_of_a_step_failure_reaches_the_client(make_engine: MakeEngine, settings: GenerateSettings) -> None:
    def step(request: StepRequest) -> StepResult:
        raise StepFailed("Stub process is not healthy")

    engine = make_engine(step, settings)
    assert "Stub process is not healthy" in str(submit(engine).wait().error)


def test_a_malformed_result_is_a_failed_step(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    def broken(request: StepRequest) -> StepResult:
        result = step(request)
        result.output_tokens = torch.cat([result.output_tokens, result.output_tokens])
        return result

    engine = make_engine(broken, settings)
    assert "OUTPUT_TOKENS" in str(submit(engine).wait().error)


def test_a_sequence_whose_cache_was_lost_is_sent_again_in_chunks_with_the_same_text(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    lost_at = {60, 75, 90, 105, 120, 135}

    def loses_cache(sequence_id: int, tokens: list[int]) -> bool:
        passed = {length for length in lost_at if len(tokens) >= length}
        lost_at.difference_update(passed)
        return bool(passed)

    step.loses_cache = loses_cache
    engine = make_engine(step, settings)
    assert submit(engine, "p" * 40, max_tokens=120).wait().text == solo_text("p" * 40, 120)
    assert not lost_at
    restarts = [request for request in step.requests[1:] if request.num_rows and int(request.context_length) == 0]
    assert len(restarts) == 6
    assert all(int(request.token_count.max()) <= 32 for request in step.requests if request.num_rows)
    assert all(int(request.previous_accepted) == -1 for request in restarts)


def test_a_cache_that_is_always_lost_ends_the_request_with_an_error(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    step.loses_cache = lambda sequence_id, tokens: True
    engine = make_engine(step, settings)
    assert "cache_slots" in str(submit(engine, "p" * 40).wait().error)


def test_a_full_queue_refuses_at_once(make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings) -> None:
    gate = Gate()
    step.before = gate
    engine = make_engine(step, settings.model_copy(update={"max_live_sequences": 1, "max_queued_requests": 2}))
    sinks = [submit(engine, "p")]
    gate.wait_until_reached()
    sinks += [submit(engine, "p") for _ in range(2)]
    with pytest.raises(ServerBusy, match="2 requests wait"):
        submit(engine, "p")
    gate.open()
    assert {sink.wait().text for sink in sinks} == {solo_text("p", 16)}


def test_closing_ends_every_request_with_an_error_and_refuses_new_ones(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    gate = Gate()
    step.before = gate
    engine = make_engine(step, settings.model_copy(update={"max_live_sequences": 1}))
    sinks = [submit(engine, "p", max_tokens=200) for _ in range(3)]
    gate.wait_until_reached()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(WAIT_SECONDS)
    assert all(isinstance(sink.wait().error, ServerBusy) for sink in sinks)
    with pytest.raises(ServerBusy, match="shutting down"):
        submit(engine, "p")


def test_a_client_that_cannot_be_reached_ends_and_the_others_go_on(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    class BrokenSink(CollectingSink):
        def send(self, response: GenerationResponse, *, final: bool) -> None:
            raise ConnectionError("gone")

    engine = make_engine(step, settings)
    broken = BrokenSink()
    broken_id = engine.submit(make_request("broken", max_tokens=240, stream=True), broken)
    other = submit(engine, "other", max_tokens=240)
    assert other.wait().text == solo_text("other", 240)
    assert broken.wait().error is not None
    decoded = [rows_of(request)[broken_id] for request in step.requests if broken_id in request.sequence_id.tolist()]
    assert decoded[-1]["context_length"] < 240


def test_a_step_carries_sampling_settings_seeds_key_and_the_last_cost(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings, evidence_key=2**64 - 1)
    submit(engine, temperature=0.5, top_p=0.25, top_k=7, seed=2**64 - 2).wait()
    first, second = step.requests[:2]
    assert (first.temperature.item(), first.top_p.item(), first.top_k.item()) == (0.5, 0.25, 7)
    assert first.seed.tolist() == [-2]
    assert first.evidence_key.tolist() == [-1]
    assert first.previous_cost.numel() == 0
    assert second.previous_cost.tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 1, 8]


def test_the_statistics_of_a_step_add_up(
    make_engine: MakeEngine, step: ScriptedStep, settings: GenerateSettings
) -> None:
    engine = make_engine(step, settings)
    last = submit(engine, "p" * 40, max_tokens=50).wait().last
    engine.close()
    records = engine.statistics.records()
    assert sum(record.prompt_tokens for record in records) == 40
    assert sum(record.output_tokens for record in records) == 50
    assert [record.first_tokens for record in records if record.first_tokens_ms > 0] == [1]
    assert sum(record.admitted_tokens for record in records) == last.total_draft_tokens
    assert sum(record.accepted_tokens for record in records) == last.total_accepted_draft_tokens
    parts = records[0].parts_ms
    assert (parts["drafter"], parts["estimator"], parts["verifier"]) == (4.0, 6.0, 7.0)
    assert sum(parts.values()) == pytest.approx(records[0].step_ms + records[0].loop_ms)

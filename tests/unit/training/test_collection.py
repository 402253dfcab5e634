"""The text that the target writes: what is kept of it is exactly what a plain forward of the same tokens gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_models import CONFIGS, tiny_model

from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.training.collection import Collector
from adaptive_verification.training.jobs import SAMPLINGS, Job, Sampling
from adaptive_verification.training.shards import CollectedSequence, ShardDirectory, read_shard

HANDOVER = [90, 91, 92]
END_TOKEN = 90
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def collected() -> dict[int, CollectedSequence]:
    model = CausalModel(
        tiny_model(CONFIGS["llama"]), ModelOptions(torch.float32, torch.device("cpu"), 3, 64), hidden_layers=(1, 3)
    )
    collector = Collector(
        model,
        end_tokens=frozenset({END_TOKEN}),
        handover=HANDOVER,
        max_new_tokens=MAX_NEW_TOKENS,
        max_prompt_tokens_per_step=6,
    )
    jobs = [Job(i, [1 + i, 2, 3][: 1 + i % 3], SAMPLINGS[i % 4], answers_itself=i % 2 == 1) for i in range(9)]
    return {sequence.job: sequence for sequence in collector.run(iter(jobs), lambda: True)}


def test_every_job_is_done_whatever_shares_its_batches(collected: dict[int, CollectedSequence]) -> None:
    assert sorted(collected) == list(range(9))
    for number, sequence in collected.items():
        assert sequence.tokens[: 1 + number % 3].tolist() == [1 + number, 2, 3][: 1 + number % 3]


def test_states_and_normalizers_are_those_of_a_plain_forward(collected: dict[int, CollectedSequence]) -> None:
    model = tiny_model(CONFIGS["llama"])
    for sequence in collected.values():
        with torch.inference_mode():
            output = model(input_ids=sequence.tokens[None, :-1].long(), output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer][0] for layer in (1, 3)], dim=-1)
        torch.testing.assert_close(sequence.states.float(), states, atol=0.05, rtol=0.02)  # kept in bfloat16
        written = ~sequence.log_normalizer.isnan()
        expected = output.logits[0].logsumexp(-1)[written]
        torch.testing.assert_close(sequence.log_normalizer[written], expected, atol=1e-3, rtol=1e-3)


def test_greedy_text_is_the_most_likely_one(collected: dict[int, CollectedSequence]) -> None:
    model = tiny_model(CONFIGS["llama"])
    greedy = [collected[number] for number in (0, 4, 8)]
    for sequence in greedy:
        with torch.inference_mode():
            logits = model(input_ids=sequence.tokens[None, :-1].long()).logits[0]
        written = ~sequence.log_normalizer.isnan()
        assert torch.equal(logits.argmax(-1)[written], sequence.tokens[1:][written].long())


def test_a_dialogue_is_handed_over_once_and_only_its_own_words_are_marked_as_written(
    collected: dict[int, CollectedSequence],
) -> None:
    for number in (1, 3, 5, 7):
        tokens = collected[number].tokens.tolist()
        given = [i for i, unwritten in enumerate(collected[number].log_normalizer.isnan().tolist(), 1) if unwritten]
        prompt_length = 1 + number % 3
        handed_over = [i for i in given if i >= prompt_length]
        assert handed_over == list(range(handed_over[0], handed_over[0] + len(handed_over)))
        first = handed_over[0]
        assert tokens[first : first + len(handed_over)] in (HANDOVER, HANDOVER[1:])
        assert len(tokens) - first - len(handed_over) <= MAX_NEW_TOKENS


def test_a_full_cache_ends_a_sequence() -> None:
    model = CausalModel(
        tiny_model(CONFIGS["llama"]), ModelOptions(torch.float32, torch.device("cpu"), 1, 16), hidden_layers=(3,)
    )
    collector = Collector(model, end_tokens=frozenset(), handover=[], max_new_tokens=1000)
    (sequence,) = collector.run(iter([Job(0, [1, 2], Sampling(1.0))]), lambda: True)
    assert len(sequence.tokens) == 16


def test_shards_give_back_what_was_written(tmp_path: Path, collected: dict[int, CollectedSequence]) -> None:
    shards = ShardDirectory(tmp_path / "text")
    shards.write([collected[0], collected[1]])
    shards.write([collected[5]])
    read = [sequence for file in shards.files() for sequence in read_shard(file)]
    assert [sequence.job for sequence in read] == [0, 1, 5]
    for sequence in read:
        original = collected[sequence.job]
        assert torch.equal(sequence.tokens, original.tokens)
        assert torch.equal(sequence.states, original.states)
        assert torch.equal(sequence.log_normalizer.isnan(), original.log_normalizer.isnan())
    assert shards.finished_jobs() == {0, 1, 5}
    assert shards.written_tokens() == sum(collected[number].num_written for number in (0, 1, 5))

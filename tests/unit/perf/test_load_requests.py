"""The requests of a round: of mixed length, out of phase from the start, the same whenever they are asked for."""

from __future__ import annotations

import random
import statistics

import pytest
from perf.load_requests import Request, ramp_up_tokens, requests_of_round

TEXTS = [f"prompt {number}" for number in range(256)]


def made(concurrency: int, max_tokens: int = 64, seed: str = "0, 0, 0") -> list[Request]:
    return requests_of_round(TEXTS, max_tokens, concurrency, random.Random(seed))


def test_the_same_round_sends_the_same_requests_and_another_round_others() -> None:
    assert made(8) == made(8)
    assert made(8)[:8] != made(8, seed="0, 0, 1")[:8]


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_the_streams_first_requests_end_one_after_the_other(concurrency: int) -> None:
    first = sorted(request.max_tokens for request in made(concurrency)[:concurrency])
    assert first == [64 * (stream + 1) // concurrency for stream in range(concurrency)]


def test_half_of_the_streams_are_at_a_second_request_when_the_ramp_up_ends() -> None:
    tokens_of_each_stream = ramp_up_tokens(8, 64) // 8
    assert sum(request.max_tokens <= tokens_of_each_stream for request in made(8)[:8]) == 4


def test_later_requests_are_spread_around_the_given_length() -> None:
    lengths = [request.max_tokens for request in made(8)[8:]]
    assert min(lengths) >= 32
    assert max(lengths) <= 96
    assert statistics.mean(lengths) == pytest.approx(64, abs=5)
    assert len(set(lengths)) > 32


def test_every_prompt_is_sent_before_one_is_sent_again() -> None:
    assert sorted(request.text for request in made(8)) == sorted(TEXTS)


def test_there_is_a_request_for_each_stream_and_each_has_a_token() -> None:
    requests = requests_of_round(TEXTS[:3], 4, 8, random.Random(0))
    assert len(requests) == 8
    assert min(request.max_tokens for request in requests) == 1

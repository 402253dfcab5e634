"""Coupled acceptance through a real server: the seed and the target alone make the text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.integration.conftest import GenerateClient, wait_until
from tests.prompts import prompts

from adaptive_verification.serving.launcher import ServerOptions, running_server

REQUEST: dict[str, Any] = {
    "text_input": "Once upon a time, in a small village by the sea,",
    "max_tokens": 12,
    "seed": 11,
    "acceptance": "coupled",
}
NUM_OTHERS = 61
"""Beside our own, as many as the server decodes at once."""
SETTINGS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.95}, {"temperature": 0.8}]


@pytest.fixture(scope="module")
def texts(client: GenerateClient) -> list[str]:
    """Of each of the settings, alone and without speculation."""
    return [client.generate(**REQUEST, **settings, num_draft_tokens=0).body["text_output"] for settings in SETTINGS]


@pytest.mark.parametrize("num_draft_tokens", [3, 7])
def test_the_number_of_drafts_does_not_change_a_seeded_text(
    client: GenerateClient, texts: list[str], num_draft_tokens: int
) -> None:
    for settings, text in zip(SETTINGS, texts, strict=True):
        answer = client.generate(**REQUEST, **settings, num_draft_tokens=num_draft_tokens)
        assert answer.body["text_output"] == text


def test_some_sixty_other_requests_do_not_change_a_seeded_text(client: GenerateClient, texts: list[str]) -> None:
    others = [
        {
            "messages": json.dumps([{"role": "user", "content": text}]),  # a chat is not over after a word
            "max_tokens": 48,
            "temperature": 1.0,
            "acceptance": ("coupled", "rejection")[i % 2],
        }
        for i, text in enumerate(prompts(NUM_OTHERS, max_characters=100))
    ]
    mine: list[dict[str, Any]] = [{**REQUEST, **settings, "num_draft_tokens": 3} for settings in SETTINGS]
    with ThreadPoolExecutor(1) as background:
        theirs = background.submit(client.generate_all, others)
        wait_until(lambda: client.metric("av_live_sequences") > 0.8 * NUM_OTHERS)
        answers = client.generate_all(mine)
        alive = client.metric("av_live_sequences")
        assert [answer.status for answer in answers + theirs.result()] == [200] * (len(mine) + len(others))
    assert [answer.body["text_output"] for answer in answers] == texts
    assert alive > NUM_OTHERS / 3, "most of the others had gone"


def test_another_drafter_does_not_change_a_seeded_text(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nor does whether drafts are trimmed. Here `coupled` is the deployment's own."""
    settings = {"dtype": "float32", "drafter": "first-layers:24", "trim": "off", "acceptance": "coupled"}
    options = ServerOptions(settings=settings, state_directory=tmp_path_factory.mktemp("state"))
    request = {name: value for name, value in REQUEST.items() if name != "acceptance"}
    with running_server(options) as server:
        answers = [GenerateClient(server).generate(**request, **of_request) for of_request in SETTINGS]
    assert [answer.body["text_output"] for answer in answers] == texts
    assert sum(answer.body["total_accepted_draft_tokens"] for answer in answers) > 0


def test_another_seed_changes_the_text(client: GenerateClient, texts: list[str]) -> None:
    assert client.generate(**{**REQUEST, "seed": 12}, **SETTINGS[0]).body["text_output"] != texts[0]


def test_an_unknown_way_of_acceptance_is_refused(client: GenerateClient) -> None:
    answer = client.generate(**{**REQUEST, "acceptance": "typical"})
    assert answer.status == 400
    assert "acceptance is 'typical'; it must be rejection or coupled" in answer.body["error"]

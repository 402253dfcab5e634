"""What the target is asked to write, and which prompt files are refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import save
from transformers import AutoTokenizer

from adaptive_verification.errors import SettingsError
from adaptive_verification.training.jobs import SAMPLINGS, ChatFrame, plan_jobs, prompt_jobs, read_prompts

TEMPLATE = "{% for m in messages %}token1 {{ m.content }} token2 {% endfor %}token3"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(save(tmp_path_factory.mktemp("target")))
    tokenizer.backend_tokenizer.pre_tokenizer = __import__("tokenizers").pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def test_a_users_text_stands_between_opening_and_handover(chat_tokenizer: Any) -> None:
    frame = ChatFrame(chat_tokenizer)
    assert (frame.opening, frame.handover) == ([1], [2, 3])
    assert frame.wrap([7, 8]) == [1, 7, 8, 2, 3]


def test_dialogues_and_prompts_share_as_asked_and_come_round_with_another_sampling(chat_tokenizer: Any) -> None:
    prompts = [("token5", False), ("token6 token7", True)]
    jobs = list(islice(plan_jobs(chat_tokenizer, prompts, dialogue_share=0.25, max_prompt_tokens=9), 12))
    assert [job.number for job in jobs] == list(range(12))
    assert [job.answers_itself for job in jobs] == [False, False, False, True] * 3
    assert {tuple(job.tokens) for job in jobs if job.answers_itself} == {(1,)}
    first = [job for job in jobs if job.tokens == [1, 5, 2, 3]]
    raw = [job for job in jobs if job.tokens == [6, 7]]
    assert len(first) + len(raw) == 9
    assert len({job.sampling for job in first}) == 4
    assert len({job.sampling for job in raw}) == 4


def test_without_prompts_a_chat_model_makes_up_its_own(chat_tokenizer: Any) -> None:
    jobs = islice(plan_jobs(chat_tokenizer, [], dialogue_share=0.1, max_prompt_tokens=9), 5)
    assert all(job.answers_itself for job in jobs)


def test_without_prompts_and_template_there_is_nothing_to_write(tokenizer: Any) -> None:
    with pytest.raises(SettingsError, match="prompts must be given"):
        next(plan_jobs(tokenizer, [], dialogue_share=0.5, max_prompt_tokens=9))


def test_every_held_out_prompt_is_written_with_every_sampling(tokenizer: Any) -> None:
    jobs = list(prompt_jobs(tokenizer, [[("token5", False)], [("token6 token7 token8", False)]], max_prompt_tokens=2))
    assert [job.tokens for job in jobs] == [[5]] * 4 + [[6, 7]] * 4
    assert [SAMPLINGS[job.number % len(SAMPLINGS)] for job in jobs] == [job.sampling for job in jobs]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", 'must be an object with a non-empty string "prompt"'),
        ('{"prompt": ""}', 'must be an object with a non-empty string "prompt"'),
        ('{"text": "hello"}', 'must be an object with a non-empty string "prompt"'),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n' + line + "\n")
    with pytest.raises(SettingsError, match=rf"prompts.jsonl:2: .*{reason}"):
        read_prompts([file])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"prompts .*nothing.jsonl: No such file"):
        read_prompts([tmp_path / "nothing.jsonl"])

"""What the target is asked to continue while training data is collected: prompts of the user's, and its own dialogues.

A chat model can invent prompts by itself: after the opening of a user's turn it writes what users write, then it is
given the opening of its own turn and answers (Xu et al. 2024, "Magpie"). Both turns are its own text, so both teach.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adaptive_verification.errors import SettingsError


class Sampling(NamedTuple):
    """How the target draws."""

    temperature: float
    top_p: float = 1.0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")


SAMPLINGS = (Sampling(0.0), Sampling(0.7), Sampling(1.0), Sampling(1.0, 0.95))
"""In turn over the jobs: drafts are asked for with all of them."""
USER_SAMPLING = Sampling(1.0)
"""Of the user's turn in a dialogue with itself: the prompts should differ."""
_USER_TEXT = "\u2042USER TEXT\u2042"


@dataclass(frozen=True)
class Job:
    """One sequence for the target to write."""

    number: int
    tokens: list[int]
    """What it starts from."""
    sampling: Sampling
    answers_itself: bool = False
    """The target writes a user's turn first, then its own answer."""


class ChatFrame:
    """The pieces of a chat template around a user's text.

    Attributes:
        opening: tokens before the user's text.
        handover: tokens between the user's text and the answer; the first of them ends a turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises SettingsError where the tokenizer has no template, or none that keeps the user's text whole."""
        if tokenizer.chat_template is None:
            raise SettingsError("the target has no chat template")
        messages = [{"role": "user", "content": _USER_TEXT}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        opening, found, handover = text.partition(_USER_TEXT)
        if not found:
            raise SettingsError("the target's chat template does not keep the user's text as it is")
        self.opening: list[int] = tokenizer(opening, add_special_tokens=False)["input_ids"]
        self.handover: list[int] = tokenizer(handover, add_special_tokens=False)["input_ids"]

    def wrap(self, tokens: list[int]) -> list[int]:
        """A user's tokens, ready for the answer."""
        return [*self.opening, *tokens, *self.handover]


def read_prompts(paths: Sequence[Path]) -> list[tuple[str, bool]]:
    """The prompts of JSONL files: objects with a string `prompt`, and `"raw": true` for text without chat template.

    Returns:
        (text, raw) of each line, in order.

    Raises:
        SettingsError: naming the file and line.
    """
    prompts = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise SettingsError(f"prompts {path}: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise SettingsError(f"{path}:{number}: not JSON: {error.msg}") from None
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
                raise SettingsError(f'{path}:{number}: each line must be an object with a non-empty string "prompt"')
            prompts.append((entry["prompt"], bool(entry.get("raw", False))))
    return prompts


def prompt_jobs(
    tokenizer: Any, files: Sequence[Sequence[tuple[str, bool]]], *, max_prompt_tokens: int
) -> Iterator[Job]:
    """Every prompt once with each sampling; job numbers tell which (`number % len(SAMPLINGS)`)."""
    frame = ChatFrame(tokenizer) if tokenizer.chat_template is not None else None
    prompts = [prompt for file in files for prompt in file]
    for place, (text, raw) in enumerate(prompts):
        tokens = _encode(tokenizer, frame, text, raw, max_prompt_tokens)
        for offset, sampling in enumerate(SAMPLINGS):
            yield Job(place * len(SAMPLINGS) + offset, tokens, sampling)


def _encode(tokenizer: Any, frame: ChatFrame | None, text: str, raw: bool, max_tokens: int) -> list[int]:
    is_plain = raw or frame is None
    tokens: list[int] = tokenizer(text, add_special_tokens=is_plain)["input_ids"][:max_tokens]
    return tokens if is_plain or frame is None else frame.wrap(tokens)


def plan_jobs(
    tokenizer: Any, prompts: Sequence[tuple[str, bool]], *, dialogue_share: float, max_prompt_tokens: int
) -> Iterator[Job]:
    """Endless jobs: the prompts in turn and, in the given share, dialogues that the target makes up.

    A prompt comes round again with another sampling. Prompts longer than `max_prompt_tokens` are cut.

    Args:
        dialogue_share: 0 to 1; 1 where there are no prompts. A model without chat template continues plain text.
    """
    frame = ChatFrame(tokenizer) if tokenizer.chat_template is not None else None
    if not prompts and frame is None:
        raise SettingsError("the target has no chat template to make up prompts with: prompts must be given")
    dialogue_share = 0.0 if frame is None else dialogue_share if prompts else 1.0
    number, used, dialogues = 0, 0, 0.0
    while True:
        dialogues += dialogue_share
        if frame is not None and dialogues >= 1:
            dialogues -= 1
            yield Job(number, list(frame.opening), SAMPLINGS[number % len(SAMPLINGS)], answers_itself=True)
        else:
            text, raw = prompts[used % len(prompts)]
            turn = used // len(prompts)
            used += 1
            sampling = SAMPLINGS[(used + turn) % len(SAMPLINGS)]
            yield Job(number, _encode(tokenizer, frame, text, raw, max_prompt_tokens), sampling)
        number += 1

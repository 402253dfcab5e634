"""Fixtures of the engine's tests: settings whose every bound is within reach, and engines that get closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.generation.scripted import END_TOKEN, ScriptedStep, make_byte_tokenizer
from tokenizers import Tokenizer

from adaptive_verification.generation.detokenizer import Detokenizer
from adaptive_verification.generation.engine import Engine
from adaptive_verification.settings import GenerateSettings


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return make_byte_tokenizer()


@pytest.fixture
def settings() -> GenerateSettings:
    return GenerateSettings.from_strings({"max_context_tokens": "256", "max_prompt_tokens_per_step": "32"})


@pytest.fixture
def step(settings: GenerateSettings) -> ScriptedStep:
    return ScriptedStep(settings.max_context_tokens)


@pytest.fixture
def make_engine(byte_tokenizer: Tokenizer) -> Iterator[Callable[..., Engine]]:
    """Makes engines and closes them after the test."""
    engines: list[Engine] = []

    def make(step: Any, settings: GenerateSettings, **options: Any) -> Engine:
        engine = Engine(
            step,
            settings,
            new_detokenizer=lambda: Detokenizer(byte_tokenizer),
            **{"end_token_ids": frozenset({END_TOKEN})} | options,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()

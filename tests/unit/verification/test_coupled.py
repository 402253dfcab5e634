"""Coupled acceptance: a seeded text is a function of seed and target, over the real drafter and verifier stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.step_requests import RequestRow, step_request
from tests.table_model import TableModel, random_distributions
from torch import Tensor

from adaptive_verification.contract import COUPLED, REJECTION, Draft, Estimate, LocalStep, StepRequest
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.sampling.gumbel import gumbel
from adaptive_verification.sampling.truncation import scale, truncate
from adaptive_verification.verification.stage import VerifierStage

VOCAB_SIZE = 100
TARGET = random_distributions(VOCAB_SIZE, seed=1)
Distribution = Callable[[tuple[int, ...]], Tensor]


def likeness(weight: float) -> Distribution:
    """A drafter between chance and the target itself."""
    other = random_distributions(VOCAB_SIZE, seed=2)
    return lambda prefix: weight * TARGET(prefix) + (1 - weight) * other(prefix)


class AdmitByToken:
    """Admits drafts until one whose token looks bad: a rule that would bias the output of rejection."""

    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        admitted = [
            next((i for i, token in enumerate(tokens.tolist()) if token % 3 == 0), len(tokens))
            for tokens in draft.draft_tokens.split(draft.drafted_count.tolist())
        ]
        return Estimate(torch.tensor(admitted, dtype=torch.int32), draft.drafted_count, torch.zeros(1))


class AdmitAll:
    def step(self, request: StepRequest, draft: Draft) -> Estimate:
        return Estimate(draft.drafted_count, draft.drafted_count, torch.zeros(1))


@dataclasses.dataclass
class Text:
    """A sequence as its caller keeps it."""

    prompt: tuple[int, ...]
    draft_limit: int = 0
    seed: int = 5
    acceptance: int = COUPLED
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.confirmed = 0

    def output(self, length: int) -> list[int]:
        return self.tokens[len(self.prompt) :][:length]


def make_step(drafter: Distribution, estimator: Any = None, num_slots: int = 8) -> LocalStep:
    return LocalStep(
        CausalDrafter(
            TableModel(VOCAB_SIZE, drafter, num_slots),  # type: ignore[arg-type]
            target_vocab_size=VOCAB_SIZE,
            idle_seconds=60,
            draft_top_k=20,
            max_catch_up_tokens=100,
        ),
        estimator or AdmitAll(),
        VerifierStage(TableModel(VOCAB_SIZE, TARGET, num_slots), idle_seconds=60),  # type: ignore[arg-type]
    )


def write(step: LocalStep, texts: Sequence[Text], length: int, *, forget_every: int = 0) -> None:
    """Runs steps until every text has so many new tokens; may lose all caches every so many steps."""
    num_steps = 0
    while min(len(text.tokens) - len(text.prompt) for text in texts) < length:
        num_steps += 1
        forget = bool(forget_every) and num_steps % forget_every == 0
        for text in texts:
            text.confirmed = 0 if forget else text.confirmed
        rows = [
            RequestRow(
                i,
                text.confirmed,
                text.tokens[text.confirmed :],
                text.draft_limit,
                seed=text.seed,
                acceptance=text.acceptance,
                **text.settings,
            )
            for i, text in enumerate(texts)
        ]
        result = step(step_request(rows, release=range(len(texts)) if forget else ()))
        outputs = result.output_tokens.split(result.output_count.tolist())
        for text, output in zip(texts, outputs, strict=True):
            text.confirmed = len(text.tokens)
            text.tokens += output.tolist()
            text.accepted += len(output) - 1


def by_definition(text: Text, length: int) -> list[int]:
    """argmax of log p + noise at each position, one token after the other, without any stage."""
    tokens = list(text.prompt)
    for _ in range(length):
        temperature = torch.tensor([float(text.settings.get("temperature", 1.0))])
        scaled = scale(TARGET(tuple(tokens)).log().unsqueeze(0), temperature)
        top_k, top_p = int(text.settings.get("top_k", 0)), float(text.settings.get("top_p", 1.0))
        if temperature == 0 or top_k or top_p < 1:
            kept = truncate(scaled, temperature, torch.tensor([top_k]), torch.tensor([top_p]))
            probs = kept.dense(scaled.shape[-1])
        else:
            probs = scaled.softmax(-1)
        of_tokens = gumbel(torch.tensor([text.seed]), torch.tensor([len(tokens)]), torch.arange(VOCAB_SIZE)[None])
        tokens.append(int((probs.log() + of_tokens).argmax()))
    return tokens[len(text.prompt) :]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.4, "top_k": 30, "top_p": 0.9},
]
LENGTH = 16


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("draft_limit", [0, 3, 7])
def test_the_text_is_the_definitions_for_any_number_of_drafts(draft_limit: int, settings: dict[str, Any]) -> None:
    text = Text((1, 2, 3), draft_limit, settings=settings)
    write(make_step(likeness(0.8)), [text], LENGTH)
    assert text.output(LENGTH) == by_definition(text, LENGTH)
    assert (text.accepted > 0) == (draft_limit > 0)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("estimator", [AdmitAll(), AdmitByToken()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("forget_every", [0, 2])
def test_the_text_does_not_depend_on_drafter_trimming_or_caches(
    weight: float, estimator: Any, forget_every: int
) -> None:
    text = Text((4, 5), draft_limit=4)
    write(make_step(likeness(weight), estimator), [text], LENGTH, forget_every=forget_every)
    assert text.output(LENGTH) == by_definition(text, LENGTH)


def test_the_text_is_the_same_alone_and_among_others_of_both_kinds() -> None:
    def make_texts() -> list[Text]:
        return [
            Text((i, i + 1), draft_limit=i % 4, seed=i, acceptance=(COUPLED, REJECTION)[i // 6 % 2], settings=settings)
            for i, settings in enumerate(SETTINGS + SETTINGS)
        ]

    together, drafter = make_texts(), likeness(0.7)
    write(make_step(drafter, num_slots=16), together, LENGTH)
    for text, alone in zip(together, make_texts(), strict=True):
        write(make_step(drafter), [alone], LENGTH)
        assert text.output(LENGTH) == alone.output(LENGTH)


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    text = Text((1,), draft_limit=3, settings={"top_k": 20})  # the drafter keeps 20 candidates as well
    write(make_step(TARGET), [text], LENGTH)
    assert text.accepted == 3 * len(text.output(LENGTH + 4)) // 4


def test_other_seeds_and_places_bring_other_tokens() -> None:
    texts = [Text((1,), seed=seed) for seed in range(8)]
    write(make_step(TARGET), texts, LENGTH)
    assert len({tuple(text.output(LENGTH)) for text in texts}) == 8


def test_a_coupled_draft_travels_alone() -> None:
    """Given the noise it is certain, and the target does not ask how likely it was."""
    drafter = CausalDrafter(
        TableModel(VOCAB_SIZE, TARGET),  # type: ignore[arg-type]
        target_vocab_size=VOCAB_SIZE,
        idle_seconds=60,
        draft_top_k=20,
        max_catch_up_tokens=100,
    )
    rows = [RequestRow(i, 0, [1, 2], draft_limit=3, acceptance=kind) for i, kind in enumerate((COUPLED, REJECTION))]
    draft = drafter.step(step_request(rows)).validate()
    assert draft.candidate_count.tolist() == [1, 1, 1, 20, 20, 20]
    assert draft.candidate_ids[:3].tolist() == draft.draft_tokens[:3].tolist()
    assert draft.candidate_probs[:3].tolist() == [1.0, 1.0, 1.0]

"""The study of the verifier's step sends steps that are valid and computed anew each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from perf.verify import SAMPLINGS, Step, proposal, texts
from tests.table_model import TableModel, random_distributions

from adaptive_verification.verification.stage import VerifierStage

VOCAB_SIZE = 97


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str) -> dict[str, Any]:
        return {"input_ids": [ord(letter) % VOCAB_SIZE for letter in text]}


def test_texts_begin_elsewhere_and_are_repeated_where_they_are_short(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "abcdefg" * 3}) for _ in range(2)))
    rows = texts([file], Letters(), count=5, length=20)
    assert [len(row) for row in rows] == [20] * 5
    assert rows[0] != rows[1]


def test_a_proposal_is_a_distribution_around_each_draft() -> None:
    draft, estimate = proposal([[3, 4], [], [5]], VOCAB_SIZE)
    assert draft.candidate_probs.view(3, -1).sum(-1).tolist() == pytest.approx([1.0] * 3)
    assert draft.candidate_ids.view(3, -1)[:, 0].tolist() == draft.draft_tokens.tolist() == [3, 4, 5]
    assert estimate.admitted_count.tolist() == [2, 0, 1]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_repeated_step_is_computed_each_time(sampling: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableModel(VOCAB_SIZE, random_distributions(VOCAB_SIZE, seed=1), num_slots=4, capacity=64)
    computed: list[int] = []
    forward = model.forward

    def counted(token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        computed.append(len(token_ids))
        return forward(token_ids, *others)

    monkeypatch.setattr(model, "forward", counted)
    rows = [[(7 * row + 3 * place) % VOCAB_SIZE for place in range(14)] for row in range(3)]
    step = Step(VerifierStage(model, idle_seconds=60), rows, 10, [1, 2, 3], VOCAB_SIZE)  # type: ignore[arg-type]
    step.prefill()
    run = step.run(sampling)
    for _ in range(4):
        run()
    assert computed == [30, 6, 6, 6, 6]

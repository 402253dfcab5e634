"""The whole way without Triton: the engine over the real stages, with real transformers models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.device import DEVICE
from tests.tiny_models import CONFIGS, tiny_model
from tests.unit.generation.scripted import CollectingSink, byte_tokens, make_request
from transformers import LlamaConfig, PreTrainedModel

from adaptive_verification.contract import Draft, LocalStep, StepRequest
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork, NetworkShape
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.generation.engine import Engine
from adaptive_verification.settings import EstimatorSettings, GenerateSettings
from adaptive_verification.verification.stage import VerifierStage

OPTIONS = ModelOptions(torch.float32, DEVICE, num_slots=8, max_context_tokens=256)
HIDDEN_LAYERS = (1, 3)


def draft_model(target: PreTrainedModel) -> CausalModel:
    return CausalModel(tiny_model(target.config, seed=2), OPTIONS)


def hidden_state_model(target: PreTrainedModel) -> HiddenStateModel:
    return HiddenStateModel(
        HiddenStateNetwork(NetworkShape(HIDDEN_LAYERS, 1), target, torch.arange(0, 258, 2)).to(DEVICE).eval(), OPTIONS
    )


class CountingDrafter(CausalDrafter):
    """Knows how much it drafted."""

    num_drafted = 0

    def step(self, request: StepRequest) -> Draft:
        draft = super().step(request)
        self.num_drafted += int(draft.drafted_count.sum())
        return draft


@pytest.mark.parametrize("make_drafter", [draft_model, hidden_state_model])
def test_the_engine_writes_the_targets_own_greedy_text(
    make_engine: Callable[..., Engine],
    settings: GenerateSettings,
    make_drafter: Callable[[PreTrainedModel], CausalModel | HiddenStateModel],
) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    assert isinstance(config, LlamaConfig)
    config.vocab_size, config.max_position_embeddings = 258, 256
    target = tiny_model(config, seed=1)
    reference = copy.deepcopy(target)
    drafter_stage = CountingDrafter(
        make_drafter(target), target_vocab_size=258, idle_seconds=60, draft_top_k=16, max_catch_up_tokens=64
    )
    verifier_stage = VerifierStage(CausalModel(target, OPTIONS, hidden_layers=HIDDEN_LAYERS), idle_seconds=60)
    step = LocalStep(drafter_stage, EstimatorStage(EstimatorSettings()), verifier_stage)
    engine = make_engine(step, settings, end_token_ids=frozenset())

    prompts = ["a", "some prompt", "x" * 70]  # the last one is computed in chunks
    sinks = []
    for prompt in prompts:
        sinks.append(CollectingSink())
        engine.submit(make_request(prompt, max_tokens=20, temperature=0.0), sinks[-1])
    for prompt, sink in zip(prompts, sinks, strict=True):
        ids = torch.tensor([byte_tokens(prompt)], device=DEVICE)
        with torch.inference_mode():
            for _ in range(20):
                ids = torch.cat([ids, reference(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        expected = bytes(token - 2 for token in ids[0, len(byte_tokens(prompt)) :].tolist() if token >= 2)
        assert sink.wait().text == expected.decode(errors="replace")
        assert sink.num_output_tokens == 20
    assert drafter_stage.num_drafted > 20

"""The whole way without Triton: the engine over the real stages, with real transformers models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from tests.tiny_models import CONFIGS, tiny_model
from tests.unit.generation.scripted import CollectingSink, byte_tokens, make_request
from transformers import LlamaConfig

from adaptive_verification.contract import LocalStep
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.generation.engine import Engine
from adaptive_verification.settings import EstimatorSettings, GenerateSettings
from adaptive_verification.verification.stage import VerifierStage


def test_the_engine_writes_the_targets_own_greedy_text(
    make_engine: Callable[..., Engine], settings: GenerateSettings
) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    assert isinstance(config, LlamaConfig)
    config.vocab_size, config.max_position_embeddings = 258, 256
    target, drafter = tiny_model(config, seed=1), tiny_model(config, seed=2)
    reference = copy.deepcopy(target)
    options = ModelOptions(torch.float32, torch.device("cpu"), num_slots=8, max_context_tokens=256)
    drafter_stage = CausalDrafter(
        CausalModel(drafter, options), target_vocab_size=258, idle_seconds=60, draft_top_k=16, max_catch_up_tokens=64
    )
    verifier_stage = VerifierStage(CausalModel(target, options), idle_seconds=60)
    step = LocalStep(drafter_stage, EstimatorStage(EstimatorSettings()), verifier_stage)
    engine = make_engine(step, settings, end_token_ids=frozenset())

    prompts = ["a", "some prompt", "x" * 70]  # the last one is computed in chunks
    sinks = []
    for prompt in prompts:
        sinks.append(CollectingSink())
        engine.submit(make_request(prompt, max_tokens=20, temperature=0.0), sinks[-1])
    for prompt, sink in zip(prompts, sinks, strict=True):
        ids = torch.tensor([byte_tokens(prompt)])
        with torch.inference_mode():
            for _ in range(20):
                ids = torch.cat([ids, reference(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        expected = bytes(token - 2 for token in ids[0, len(byte_tokens(prompt)) :].tolist() if token >= 2)
        assert sink.wait().text == expected.decode(errors="replace")
        assert sink.num_output_tokens == 20

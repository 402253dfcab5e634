"""Joined projections compute what the model's own do, for the architectures that have them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.tiny_models import COMMON, CONFIGS, tiny_model
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward import (
    called_products,
    fused_forward,
    layer_loops,
    linear,
    looped_rows,
    ragged_attention,
)
from adaptive_verification.forward.fused_forward import FusedForward
from adaptive_verification.forward.linear import can_pack, use_fastest_linear
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.transformers_forward import TransformersForward, attention_dimensions

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FUSED = {
    "llama": CONFIGS["llama"],
    "llama with biases": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama with a head size of its own": LlamaConfig(**COMMON, head_dim=16),
    "llama 3 rotary": LlamaConfig(**COMMON, rope_parameters=LLAMA_3_ROPE),
    "yarn rotary": LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON),
}
ROWS = [[Row(0, 0, 9), Row(3, 0, 4)], [Row(3, 4, 1), Row(0, 9, 5), Row(1, 0, 3)], [Row(0, 12, 2), Row(1, 3, 1)]]
"""Prompts, then blocks and single tokens beside a new prompt, then a truncated row."""


@pytest.fixture(
    params=["by torch", "by loops", "by loops of several threads"],
    autouse=True,
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways of computing a layer on a CPU."""
    if request.param == "by torch":  # as on a GPU
        for module in (ragged_attention, fused_forward):
            monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    elif request.param == "by loops of several threads":
        monkeypatch.setattr(looped_rows, "POSITIONS_OF_ONE_THREAD", 0)
    return str(request.param)


def logits_and_states(
    forward: FusedForward | TransformersForward, cache: KVCache, logits_at: Sequence[int] | None
) -> list[Tensor]:
    """Of the steps ROWS in turn."""
    results = []
    generator = torch.Generator().manual_seed(0)
    for rows in ROWS:
        batch = RaggedBatch(rows, cache)
        tokens = torch.randint(0, 64, (batch.num_tokens,), generator=generator).to(DEVICE)
        places = (
            torch.arange(batch.num_tokens, device=DEVICE)
            if logits_at is None
            else torch.tensor(logits_at, device=DEVICE)
        )
        with torch.inference_mode():
            results += [forward(tokens, batch.positions, batch, places), forward.hidden_states()]
    return results


def cache_for(forward: FusedForward | TransformersForward, num_layers: int, dtype: torch.dtype) -> KVCache:
    token = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    key_dim, value_dim, kv_heads = attention_dimensions(lambda attention: forward(token, token, attention, token))
    return KVCache(num_layers, 4, kv_heads, 64, key_dim, value_dim, dtype, DEVICE)


def both(model: PreTrainedModel, hidden_layers: Sequence[int]) -> list[FusedForward | TransformersForward]:
    assert FusedForward.can_fuse(model)
    return [FusedForward(model, hidden_layers), TransformersForward(copy.deepcopy(model), hidden_layers)]


def with_biases_and_norms(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Biases start at 0 and norms at 1: neither would be seen."""
    model = tiny_model(config, dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape).to(parameter))
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.12)])
@pytest.mark.parametrize("name", FUSED)
def test_logits_and_hidden_states_are_those_of_the_model_itself(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = with_biases_and_norms(FUSED[name], dtype)
    results = [
        logits_and_states(forward, cache_for(forward, model.config.num_hidden_layers, dtype), None)
        for forward in both(model, (1, 3))
    ]
    for fused, own in zip(*results, strict=True):
        assert fused.shape == own.shape
        assert (fused - own).abs().max() <= tolerance * own.float().std()


def test_logits_only_where_they_are_asked_for_and_states_everywhere() -> None:
    model = tiny_model(CONFIGS["llama"])
    for layers in ((1, 2), (2, 3)):
        results = [
            logits_and_states(forward, cache_for(forward, 3, torch.float32), [2, 0]) for forward in both(model, layers)
        ]
        for fused, own in zip(*results, strict=True):
            torch.testing.assert_close(fused, own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_nobody_in_the_products_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = FusedForward(with_biases_and_norms(FUSED["llama with biases"], dtype), (1, 3))
    plain = logits_and_states(fused, cache_for(fused, 3, dtype), None)
    monkeypatch.setattr(fused_forward, "multiplied_rows", lambda linear, num_rows: num_rows + 5)
    padded = logits_and_states(fused, cache_for(fused, 3, dtype), None)
    for own, other in zip(plain, padded, strict=True):
        assert own.shape == other.shape
        assert (own - other).abs().max() <= (2e-5 if dtype == torch.float32 else 0.12) * own.float().std()


@pytest.mark.skipif(not can_pack(torch.ones(1, 1).bfloat16()), reason="the processor multiplies no bfloat16")
@pytest.mark.parametrize("products", ["packed", "streamed"])
@pytest.mark.parametrize("name", FUSED)
def test_loops_that_call_the_products_give_the_bits_of_calls_one_by_one(
    name: str, products: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called_products.are_callable()
    monkeypatch.setattr(linear, "fastest_way", lambda linears: products)
    monkeypatch.setattr(linear, "_STREAMED_MOST_ROWS", 9)  # some steps have more tokens
    model = with_biases_and_norms(FUSED[name], torch.bfloat16)
    num_calls = {"project": 0, "update": 0}

    def counted(part: str, loop: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            num_calls[part] += 1
            loop(*arguments)

        return call

    for part in num_calls:
        monkeypatch.setattr(layer_loops, part, counted(part, getattr(layer_loops, part)))
    results = []
    for are_callable in (False, True):
        monkeypatch.setattr(called_products, "are_callable", lambda are_callable=are_callable: are_callable)
        fused = FusedForward(model, (1, 3))
        assert use_fastest_linear(fused.module) == products
        results.append(logits_and_states(fused, cache_for(fused, 3, torch.bfloat16), None))
        of_loops = 3 * len(ROWS) if are_callable and way != "by torch" else 0
        assert num_calls == {"project": of_loops, "update": of_loops}
    for one_by_one, by_loops in zip(*results, strict=True):
        assert torch.equal(one_by_one, by_loops)


def test_the_model_that_gave_the_weights_is_left_as_it_was() -> None:
    model = tiny_model(CONFIGS["llama"])
    before = copy.deepcopy(model.state_dict())
    fused = FusedForward(model, (3,))
    logits_and_states(fused, cache_for(fused, 3, torch.float32), None)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in FUSED])
def test_other_architectures_run_as_they_are(name: str) -> None:
    assert not FusedForward.can_fuse(tiny_model(CONFIGS[name]))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=["another activation", "half of the head is turned"],
)
def test_what_a_known_architecture_does_differently_is_not_fused(change: dict[str, Any]) -> None:
    assert not FusedForward.can_fuse(tiny_model(LlamaConfig(**COMMON, **change)))


def test_hidden_layers_that_are_none_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="hidden layer 4 is out of range; the model has layers 1 to 3"):
        FusedForward(tiny_model(CONFIGS["llama"]), (1, 4))

"""The packed forward against the model's own, one sequence at a time: cached equals naive."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tests.device import DEVICE
from tests.tiny_models import COMMON, CONFIGS, SLIDING_WINDOW_CONFIG, VOCAB_SIZE, tiny_model
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel

from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.forward.row import Row

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.12}  # relative to the spread of the logits


def options(dtype: torch.dtype, num_slots: int = 8, max_context_tokens: int = 96) -> ModelOptions:
    return ModelOptions(dtype, DEVICE, num_slots, max_context_tokens)


def own_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float().cpu()


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (got.float().cpu() - expected.cpu()).abs().max().item()
    assert difference <= TOLERANCE[dtype] * expected.std().item(), f"logits differ by {difference}"


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_copied_prefix_is_as_good_as_a_computed_one(architecture: str) -> None:
    model = tiny_model(CONFIGS[architecture])
    tokens = torch.arange(1, 13)
    expected = own_logits(copy.deepcopy(model), tokens.tolist())
    packed = CausalModel(model, options(torch.float32), hidden_layers=(1, 3))
    packed.forward(tokens[:9], [Row(5, 0, 9)], None)
    packed.copy_prefix(5, 2, 0, 3)
    packed.copy_prefix(5, 2, 3, 8)
    logits = packed.forward(tokens[8:], [Row(2, 8, 4)], torch.arange(4, device=DEVICE))
    assert_close(logits, expected[8:], torch.float32)
    positions = torch.arange(8)
    copied, computed = (packed.hidden_states(torch.full((8,), slot), positions) for slot in (2, 5))
    assert torch.equal(copied, computed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_packed_steps_equal_the_models_own_forward(architecture: str, dtype: torch.dtype) -> None:
    """Prompts of different lengths, single tokens, blocks of drafts, truncations and reused slots, mixed in each
    step."""
    model = tiny_model(CONFIGS[architecture], dtype)
    reference = copy.deepcopy(model)
    packed = CausalModel(model, options(dtype))
    rng = random.Random(1)
    sequences: dict[int, list[int]] = {}  # slot -> tokens whose keys and values are cached
    for _ in range(8):
        slots = rng.sample(range(8), rng.randint(1, 6))
        rows, new_tokens = [], []
        for slot in slots:
            cached = sequences.get(slot, [])
            event = rng.random()
            if event < 0.2:
                cached = []  # evicted: the slot belongs to another sequence now
            elif event < 0.5 and cached:
                cached = cached[: rng.randint(0, len(cached))]  # rejected drafts are cut off
            length = rng.choice([1, 1, 2, 5, 17]) if cached else rng.randint(1, 20)
            length = min(length, 96 - len(cached))
            if length == 0:
                cached, length = [], 1
            new = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
            rows.append(Row(slot, len(cached), length))
            new_tokens.append(new)
            sequences[slot] = cached + new
        packed_tokens = torch.tensor([token for new in new_tokens for token in new])
        logits = packed.forward(packed_tokens, rows, torch.arange(len(packed_tokens)))
        for slot, row, row_logits in zip(slots, rows, logits.split([row.query_length for row in rows]), strict=True):
            assert_close(row_logits, own_logits(reference, sequences[slot])[row.context_length :], dtype)


def test_logits_are_computed_only_where_they_are_asked_for() -> None:
    packed = CausalModel(tiny_model(CONFIGS["llama"]), options(torch.float32))
    tokens = torch.arange(7)
    rows = [Row(0, 0, 4), Row(3, 0, 3)]
    everywhere = packed.forward(tokens, rows, torch.arange(7))
    assert_close(packed.forward(tokens, rows, torch.tensor([5, 1])), everywhere[[5, 1]], torch.float32)
    assert_close(packed.forward(tokens, rows, None), everywhere[[3, 6]], torch.float32)


def test_what_others_left_in_the_cache_does_not_matter() -> None:
    packed = CausalModel(tiny_model(CONFIGS["llama"]), options(torch.float32))
    tokens = torch.tensor([3, 1, 4, 1, 5])
    before = packed.forward(tokens, [Row(2, 0, 5)], None)
    for layer in (*packed.cache.keys, *packed.cache.values):
        layer.fill_(1e4)
    after = packed.forward(tokens, [Row(2, 0, 5)], None)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SLIDING_WINDOW_CONFIG, "sliding window of 8"),
        (Gemma2Config(**COMMON, head_dim=16, sliding_window=512), "softcap"),
        (LlamaConfig(**{**COMMON, "max_position_embeddings": 64}), "max_context_tokens=96"),
        (
            LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "dynamic rotary",
        ),
    ],
    ids=["sliding window", "softcap", "too few positions", "batch-dependent rotary"],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(config: LlamaConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        CausalModel(tiny_model(config), options(torch.float32))


def test_a_sliding_window_longer_than_the_context_is_served() -> None:
    model = tiny_model(SLIDING_WINDOW_CONFIG)
    tokens = [5, 7, 11, 13, 17, 19]
    reference = own_logits(copy.deepcopy(model), tokens)
    packed = CausalModel(model, options(torch.float32, max_context_tokens=8))
    assert_close(packed.forward(torch.tensor(tokens), [Row(0, 0, 6)], torch.arange(6)), reference, torch.float32)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_probe_refuses_a_model_whose_attention_differs_silently(monkeypatch: pytest.MonkeyPatch, sign: int) -> None:
    model = tiny_model(CONFIGS["llama"])
    original = type(model.model.layers[0].self_attn).forward

    def biased(self, hidden_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        output, weights = original(self, hidden_states, *args, **kwargs)
        return output + sign * hidden_states.flip(1), weights  # depends on the other packed tokens

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", biased)
    with pytest.raises(UnsupportedModel, match="differs from the model's own"):
        CausalModel(model, options(torch.float32))


def test_the_first_layers_share_the_models_head(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = tiny_model(CONFIGS["llama"])
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states[2]
        expected = model.lm_head(model.model.norm(hidden))[0]
    shallow = CausalModel.load(str(tmp_path), options(torch.float32), num_layers=2)
    assert_close(shallow.forward(torch.tensor([1, 2, 3]), [Row(0, 0, 3)], torch.arange(3)), expected, torch.float32)
    with pytest.raises(UnsupportedModel, match="first-layers:4"):
        CausalModel.load(str(tmp_path), options(torch.float32), num_layers=4)

"""Tiny random models of several architectures: real transformers code, made in milliseconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tests.device import DEVICE

VOCAB_SIZE = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "gemma": GemmaConfig(**{**COMMON, "num_key_value_heads": 1}, head_dim=16),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=3, n_head=4, n_positions=128),
}
VOCABULARY = {f"token{i}": i for i in range(VOCAB_SIZE)}
SLIDING_WINDOW_CONFIG = MistralConfig(**COMMON, sliding_window=8)


def tiny_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model with random weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    placed: PreTrainedModel = model.to(DEVICE, dtype).eval()
    return placed


def save(directory: Path, vocabulary: dict[str, int] = VOCABULARY) -> str:
    """A model directory with the tiny llama and a tokenizer of whole words; returns its name."""
    tiny_model(CONFIGS["llama"]).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="token0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return str(directory)

"""Makes a target of a given size with random weights, whose first layers are a useful drafter, and prompts for it.

    python perf/gpu/random_pair.py DIRECTORY --size 1b

For measuring speed where no real weights are at hand: what a step costs does not depend on what the weights say. All
layers after the first few add little, so that `drafter=first-layers:N` (N is printed) is accepted about as often as a
real drafter. Writes the model with a tokenizer of whole words (`token17`), and DIRECTORY/prompts/random.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


class Size(NamedTuple):
    """Of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    drafter_layers: int


SIZES = {
    "tiny": Size(512, 64, 128, 8, 4, 2, 2),
    "1b": Size(32_000, 2048, 8192, 16, 32, 8, 2),
    "3b": Size(32_000, 3072, 8192, 28, 24, 8, 3),
}
LATER_LAYERS_SCALE = 0.15
HEAD_SCALE = 4.0
"""Makes distributions as decided as a real model's."""
NUM_PROMPTS = 256
PROMPT_WORDS = (8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD_SCALE)
        for layer in model.model.layers[size.drafter_layers :]:
            layer.self_attn.o_proj.weight.mul_(LATER_LAYERS_SCALE)
            layer.mlp.down_proj.weight.mul_(LATER_LAYERS_SCALE)
    model.save_pretrained(arguments.directory)

    words = [f"token{i}" for i in range(size.vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[1]).save_pretrained(arguments.directory)

    rng = random.Random(0)
    lines = [
        json.dumps({"prompt": " ".join(rng.choices(words, k=rng.randint(*PROMPT_WORDS)))}) for _ in range(NUM_PROMPTS)
    ]
    prompts = arguments.directory / "prompts"
    prompts.mkdir(exist_ok=True)
    (prompts / "random.jsonl").write_text("\n".join(lines) + "\n")
    print(f"first-layers:{size.drafter_layers}")


if __name__ == "__main__":
    main()

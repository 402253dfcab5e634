"""Hugging Face transformers as a peer, in an environment of its own.

    python run_transformers.py MODEL {static,lookup,continuous} DTYPE

static: `generate` on padded batches, one after another. lookup: the same with prompt-lookup assistance, a request at a
time, as it cannot do more. continuous: `generate_batch` on such batches, which does not pad.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from protocol import Batch, serve, waves  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

LOOKUP_TOKENS = 3


class Peer:
    def __init__(self, path: str, mode: str, dtype: str) -> None:
        self._mode = mode
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        attention = "paged|sdpa" if mode == "continuous" else "sdpa"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        self._model = model.to(device).eval()

    def generate(self, batch: Batch) -> int:
        torch.manual_seed(batch["seed"])
        run = self._continuous if self._mode == "continuous" else self._static
        return sum(run(batch, prompts) for prompts in waves(batch))

    def _static(self, batch: Batch, prompts: list[str]) -> int:
        inputs = self._tokenizer([self._chat(prompt) for prompt in prompts], return_tensors="pt", padding=True,
                                 add_special_tokens=False).to(self._model.device)  # fmt: skip
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self._mode == "lookup" else {}
        with torch.inference_mode():
            output = self._model.generate(**inputs, generation_config=self._config(batch), **extra)
        written = output[:, inputs["input_ids"].shape[1] :]
        return sum(self._length(row) for row in written.tolist())

    def _length(self, tokens: list[int]) -> int:
        """Up to and with the first end token; what follows is padding."""
        ends = [tokens.index(end) + 1 for end in self._ends() if end in tokens]
        return min(ends, default=len(tokens))

    def _continuous(self, batch: Batch, prompts: list[str]) -> int:
        inputs = [self._tokenizer(self._chat(prompt), add_special_tokens=False)["input_ids"]
                  for prompt in prompts]  # fmt: skip
        outputs = self._model.generate_batch(inputs, generation_config=self._config(batch), progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    def _chat(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _config(self, batch: Batch) -> GenerationConfig:
        sampled = batch["temperature"] > 0
        sampling = {"temperature": batch["temperature"], "top_p": batch["top_p"], "top_k": 0} if sampled else {}
        return GenerationConfig(
            do_sample=sampled,
            max_new_tokens=batch["max_tokens"],
            eos_token_id=self._ends(),
            pad_token_id=self._tokenizer.pad_token_id,
            **sampling,
        )

    def _ends(self) -> list[int]:
        ends = self._model.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]


if __name__ == "__main__":
    serve(lambda: Peer(*sys.argv[1:]).generate)

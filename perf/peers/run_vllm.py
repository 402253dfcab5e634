"""vLLM as a peer, in an environment of its own.

    python run_vllm.py MODEL {plain,ngram} DTYPE

ngram: with its own speculation that looks drafts up in the text.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from protocol import Batch, serve  # type: ignore[import-not-found]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 256
DRAFT_TOKENS = 3


class Peer:
    def __init__(self, path: str, mode: str, dtype: str) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        ngram = {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 6}
        self._llm: Any = LLM(
            model=path,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            **({"speculative_config": {**ngram, "prompt_lookup_min": 2}} if mode == "ngram" else {}),
        )

    def generate(self, batch: Batch) -> int:
        """Keeps `concurrency` requests in the engine until all are done."""
        from vllm import SamplingParams

        engine, tokenizer = self._llm.llm_engine, self._llm.get_tokenizer()
        waiting = list(enumerate(batch["prompts"]))[::-1]
        running, output_tokens = 0, 0
        while waiting or running:
            while waiting and running < batch["concurrency"]:
                number, prompt = waiting.pop()
                messages = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                # without a seed: with one, vLLM ends on a CPU when a prompt is cut into chunks
                params = SamplingParams(
                    temperature=batch["temperature"], top_p=batch["top_p"], max_tokens=batch["max_tokens"]
                )
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
                running += 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    output_tokens += len(output.outputs[0].token_ids)
        return output_tokens


if __name__ == "__main__":
    serve(lambda: Peer(*sys.argv[1:]).generate)

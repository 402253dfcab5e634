"""Collected sequences on disk: one safetensors file for some hundred sequences, each written once.

A sequence of S tokens has S - 1 rows of hidden states: row t is the state after token t, from which token t + 1 was
drawn. `log_normalizer[t]` is the logarithm of the sum of the exponentials of row t's logits, so that the probability of
any few tokens can be had without the whole head; NaN where nothing was drawn (the prompt).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

_PATTERN = "shard-*.safetensors"


@dataclass(frozen=True)
class CollectedSequence:
    """One sequence as the target wrote it."""

    job: int
    tokens: Tensor  # [S] int32
    states: Tensor  # [S - 1, width]
    log_normalizer: Tensor  # [S - 1] float32, NaN where the next token was given

    @property
    def num_written(self) -> int:
        """Tokens that the target wrote itself."""
        return int((~self.log_normalizer.isnan()).sum())


class ShardDirectory:
    """The shards of one collection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        return sorted(self.path.glob(_PATTERN))

    def write(self, sequences: Sequence[CollectedSequence]) -> Path:
        """Writes one more shard; it is there whole or not at all."""
        file = self.path / f"shard-{len(self.files()):05d}.safetensors"
        tensors = {
            "tokens": torch.cat([sequence.tokens for sequence in sequences]),
            "lengths": torch.tensor([len(sequence.tokens) for sequence in sequences]),
            "states": torch.cat([sequence.states for sequence in sequences]),
            "log_normalizer": torch.cat([sequence.log_normalizer for sequence in sequences]),
            "jobs": torch.tensor([sequence.job for sequence in sequences]),
        }
        written = sum(sequence.num_written for sequence in sequences)
        temporary = file.with_suffix(".partial")
        save_file(tensors, temporary, metadata={"written_tokens": json.dumps(written)})
        temporary.replace(file)
        return file

    def written_tokens(self) -> int:
        """Tokens that the target wrote, over all shards."""
        total = 0
        for file in self.files():
            with safe_open(file, framework="pt") as opened:
                total += int(json.loads(opened.metadata()["written_tokens"]))
        return total

    def finished_jobs(self) -> set[int]:
        """Numbers of the jobs that are in a shard."""
        finished: set[int] = set()
        for file in self.files():
            with safe_open(file, framework="pt") as opened:
                finished.update(opened.get_tensor("jobs").tolist())
        return finished


def read_shard(file: Path) -> list[CollectedSequence]:
    """The shard's sequences."""
    tensors = load_file(file)
    lengths = tensors["lengths"].tolist()
    rows = [length - 1 for length in lengths]
    parts = zip(
        tensors["jobs"].tolist(),
        tensors["tokens"].split(lengths),
        tensors["states"].split(rows),
        tensors["log_normalizer"].split(rows),
        strict=True,
    )
    return [CollectedSequence(*part) for part in parts]

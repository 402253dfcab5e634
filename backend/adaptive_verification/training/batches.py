"""Collected sequences as padded batches of about equal size, shuffled anew every epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adaptive_verification.training.shards import CollectedSequence

_BUCKET_BATCHES = 16
"""So many batches are sorted by length together: little padding, yet not always the same neighbours."""


@dataclass(frozen=True)
class Batch:
    """B sequences of up to S + 1 tokens. What is predicted at place t is token t + 1."""

    tokens: Tensor  # [B, S] int64
    previous_states: Tensor  # [B, S, width], the target's state before each token; zero before the first
    target_states: Tensor  # [B, S, hidden], the target's last state at each token, from which the next was drawn
    log_normalizer: Tensor  # [B, S], see `shards`
    next_tokens: Tensor  # [B, S] int64
    is_written: Tensor  # [B, S] bool, where the target wrote the next token itself

    @property
    def num_written(self) -> int:
        return int(self.is_written.sum())

    def with_previous_states(self, states: Tensor) -> Batch:
        return replace(self, previous_states=states)

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def epochs(
    sequences: Sequence[CollectedSequence], *, batch_tokens: int, hidden_size: int, seed: int
) -> Iterator[tuple[int, Batch]]:
    """Endless (epoch, batch)."""
    epoch = 0
    while True:
        numbers = random.Random(f"{seed} {epoch}")
        shuffled = numbers.sample(list(sequences), len(sequences))
        yield from ((epoch, make_batch(group, hidden_size)) for group in _groups(shuffled, batch_tokens, numbers))
        epoch += 1


def _groups(
    sequences: list[CollectedSequence], batch_tokens: int, numbers: random.Random
) -> list[list[CollectedSequence]]:
    mean_length = sum(len(sequence.tokens) for sequence in sequences) / max(len(sequences), 1)
    bucket = max(1, round(_BUCKET_BATCHES * batch_tokens / mean_length))
    groups: list[list[CollectedSequence]] = []
    for start in range(0, len(sequences), bucket):
        group: list[CollectedSequence] = []
        for sequence in sorted(sequences[start : start + bucket], key=lambda sequence: -len(sequence.tokens)):
            if group and (len(group) + 1) * len(group[0].tokens) > batch_tokens:
                groups.append(group)
                group = []
            group.append(sequence)
        groups.append(group)
    return numbers.sample(groups, len(groups))


def make_batch(sequences: Sequence[CollectedSequence], hidden_size: int) -> Batch:
    """Pads at the end: attention looks back only, so nothing sees it.

    Args:
        hidden_size: the last layer's states are the last so many of a row of states.
    """

    def padded(rows: list[Tensor], value: float = 0.0) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value)

    states = padded([sequence.states.float() for sequence in sequences])  # [B, S, width]
    log_normalizer = padded([sequence.log_normalizer for sequence in sequences], torch.nan)
    tokens = padded([sequence.tokens.long() for sequence in sequences])  # [B, S + 1]
    return Batch(
        tokens=tokens[:, :-1],
        previous_states=torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0)),
        target_states=states[..., -hidden_size:],
        log_normalizer=log_normalizer.nan_to_num(0.0),
        next_tokens=tokens[:, 1:],
        is_written=~log_normalizer.isnan(),
    )

"""A model whose next-token distributions are a table over prefixes: stands where `CausalModel` stands.

It keeps the tokens of each slot as a KV cache would, so a stage that places rows or cuts them back wrongly gets the
distribution of another prefix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adaptive_verification.forward.row import Row
from tests.device import DEVICE


class TableModel:
    """`distribution(prefix)` gives the probabilities of the next token."""

    device = DEVICE

    def __init__(
        self,
        vocab_size: int,
        distribution: Callable[[tuple[int, ...]], Tensor],
        num_slots: int = 4,
        capacity: int = 64,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.capacity = capacity
        self._distribution = distribution
        self._cached = [[-1] * capacity for _ in range(num_slots)]
        self.num_computed_tokens = 0
        self.hidden_layers = hidden_layers

    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor:
        """Log-probabilities, float64, after the packed places asked for."""
        logits, last = [], []
        tokens = token_ids.tolist()
        assert len(tokens) == sum(row.query_length for row in rows)
        self.num_computed_tokens += len(tokens)
        for row in rows:
            cached = self._cached[row.slot]
            for position in range(row.context_length, row.context_length + row.query_length):
                cached[position] = tokens.pop(0)
                prefix = tuple(cached[: position + 1])
                assert -1 not in prefix, "a position before this one was never computed"
                logits.append(self._distribution(prefix).to(torch.float64).log())
            last.append(len(logits) - 1)
        places = last if logits_at is None else logits_at.tolist()
        return (torch.stack(logits)[places] if places else torch.empty(0, self.vocab_size, dtype=torch.float64)).to(
            DEVICE
        )

    def hidden_states(self, slots: Tensor, positions: Tensor) -> Tensor:
        """`[m, 1]`: one number that tells the prefix."""
        prefixes = [self._cached[slot][: position + 1] for slot, position in zip(slots, positions, strict=True)]
        return torch.tensor([state_after(tuple(prefix)) for prefix in prefixes], device=DEVICE)[:, None]

    def copy_prefix(self, from_slot: int, to_slot: int, start: int, end: int) -> None:
        self._cached[to_slot][start:end] = self._cached[from_slot][start:end]


def state_after(prefix: tuple[int, ...]) -> float:
    """What stands for the hidden state after a prefix: exact in float32, and another number for another prefix."""
    number = len(prefix)
    for token in prefix:
        number = (number * 31 + token + 1) % 1_000_003
    return float(number)


def random_distributions(vocab_size: int, seed: int, sharpness: float = 1.5) -> Callable[[tuple[int, ...]], Tensor]:
    """Arbitrary distributions, one for each prefix, the same for the same prefix."""

    def distribution(prefix: tuple[int, ...]) -> Tensor:
        key = seed
        for token in prefix:
            key = (key * 1000003 + token + 1) % (2**31)
        generator = torch.Generator().manual_seed(key)
        return (torch.randn(vocab_size, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)

    return distribution

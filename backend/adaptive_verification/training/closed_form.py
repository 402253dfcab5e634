"""The start of training: the network's linear guess, solved by least squares instead of learned step by step.

From the token and the state before it a linear map predicts the target's next state well enough for a good part of
what a trained drafter is accepted; to reach that by gradient steps takes millions of tokens. Two ridge regressions over
the collected text: first on the target's own states, then on the states that the first one predicts, for drafts
after drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork, normalized
from adaptive_verification.training.shards import CollectedSequence

_ROWS_AT_ONCE = 4096
_RIDGE = 1e-2
"""Relative to the number of rows of text; the inputs have a mean square of 1."""


@torch.no_grad()
def fit_linear_guess(
    network: HiddenStateNetwork,
    sequences: Sequence[CollectedSequence],
    progress: Callable[[Sequence[CollectedSequence]], Iterable[CollectedSequence]] = iter,
) -> None:
    """Sets `from_token`, `from_target` and `from_own`, in place.

    Args:
        progress: wraps the sequences of each of the two passes.
    """
    hidden_size, device = network.hidden_size, network.embedding.device
    num_states = len(network.shape.hidden_layers)

    def token_part(sequence: CollectedSequence) -> Tensor:
        embedded = normalized(network.embedding[sequence.tokens[1:-1].to(device, torch.int64)])
        return torch.cat([embedded, torch.ones_like(embedded[:, :1])], dim=-1)

    def states_of(sequence: CollectedSequence) -> Tensor:
        return sequence.states.to(device, torch.float32)  # [S - 1, width]

    first = _LeastSquares(hidden_size + 1 + num_states * hidden_size, hidden_size, device)
    for sequence in progress(sequences):
        states = states_of(sequence)
        before = normalized(states[:-1].unflatten(-1, (-1, hidden_size))).flatten(-2)
        first.add(torch.cat([token_part(sequence), before], dim=-1), states[1:, -hidden_size:])
    solution = first.solve()  # [inputs, hidden]
    network.from_token.weight.copy_(solution[:hidden_size].T)
    network.from_token.bias.copy_(solution[hidden_size])
    network.from_target.weight.copy_(solution[hidden_size + 1 :].T)

    second = _LeastSquares(hidden_size, hidden_size, device)
    for sequence in progress(sequences):
        states = states_of(sequence)
        tokens = token_part(sequence)
        by_token = tokens @ solution[: hidden_size + 1]
        predicted = by_token + network.context_of_target(states[:-1])  # of the states of tokens 1 to S - 2
        second.add(normalized(predicted[:-1]), states[2:, -hidden_size:] - by_token[1:])
    network.from_own.weight.copy_(second.solve().T)


class _LeastSquares:
    """Ridge regression from sums over rows."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        self._gram = torch.zeros(num_inputs, num_inputs, dtype=torch.float64, device=device)
        self._moments = torch.zeros(num_inputs, num_outputs, dtype=torch.float64, device=device)
        self._num_rows = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        self._waiting.append((inputs, outputs))
        self._num_rows += len(inputs)
        if sum(len(rows) for rows, _ in self._waiting) >= _ROWS_AT_ONCE:
            self._sum()

    def solve(self) -> Tensor:
        """`[inputs, outputs]` float32."""
        self._sum()
        ridge = _RIDGE * max(self._num_rows, 1) * torch.eye(len(self._gram), device=self._gram.device)
        return torch.linalg.solve(self._gram + ridge, self._moments).to(torch.float32)

    def _sum(self) -> None:
        if self._waiting:
            inputs, outputs = (torch.cat(rows) for rows in zip(*self._waiting, strict=True))
            self._gram += inputs.T @ inputs
            self._moments += inputs.T @ outputs
            self._waiting = []

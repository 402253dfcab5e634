"""Runs the real code once for every way its random choices can fall, with the exact probability of each.

Three places of the package are random: the draw of a draft, the acceptance of a draft, the draw of the final token.
`Enumerator` stands in for them and takes every branch in turn, so a statement about probabilities is a sum, not a
sample. What is compiled runs as the Python that it is written in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from adaptive_verification.drafting import proposal_loop
from adaptive_verification.sampling import loops
from adaptive_verification.verification import rejection_walk
from adaptive_verification.verification.acceptance import Accepted, accept
from adaptive_verification.verification.block import Block
from adaptive_verification.verification.rejection import acceptance_probability

T = TypeVar("T", bound=Hashable)


def decide_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter draws for all rows, and the verifier decides about all positions of a step, at once, as on a GPU."""

    def accept_at_once(logits: Tensor, block: Block) -> Accepted:
        return accept(logits, block, wave_length=int(block.admitted.max()) + 1)

    monkeypatch.setattr("adaptive_verification.verification.stage.accept", accept_at_once)
    monkeypatch.setattr("adaptive_verification.drafting.stage.MOST_CANDIDATES", 0)


class Enumerator:
    """Depth-first over all choices: each run replays the choices so far and takes the next branch at their end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path: list[int] = []
        self._branches: list[list[int]] = []
        self._depth = 0
        self._probability = 1.0
        monkeypatch.setattr("adaptive_verification.drafting.proposal.draw", self._draw)
        monkeypatch.setattr("adaptive_verification.verification.target_distribution.draw", self._draw)
        monkeypatch.setattr("adaptive_verification.verification.acceptance.acceptance_probability", self._accept)
        for module, loop in ((rejection_walk, "_walk"), (proposal_loop, "_propose")):
            monkeypatch.setattr(module, loop, getattr(module, loop).py_func)  # as numba keeps it
        monkeypatch.setattr(loops, "draw_weighted", lambda weights, total, uniform: self._choose(weights.tolist()))
        monkeypatch.setattr(rejection_walk, "_accepts", self.accepts)

    def outcomes(self, run: Callable[[], T]) -> dict[T, float]:
        """Outcome of `run` -> its probability; they sum to 1."""
        probabilities: dict[T, float] = defaultdict(float)
        self._path, self._branches = [], []
        while True:
            self._depth, self._probability = 0, 1.0
            outcome = run()
            probabilities[outcome] += self._probability
            while self._branches and not self._branches[-1]:
                self._branches.pop()
                self._path.pop()
            if not self._branches:
                return dict(probabilities)
            self._path[-1] = self._branches[-1].pop()

    def _choose(self, weights: list[float]) -> int:
        if self._depth == len(self._path):
            possible = [i for i, weight in enumerate(weights) if weight > 0]
            self._path.append(possible.pop())
            self._branches.append(possible)
        choice = self._path[self._depth]
        self._depth += 1
        self._probability *= weights[choice] / sum(weights)
        return choice

    def _draw(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        return torch.tensor([self._choose(row) for row in weights.to(torch.float64).tolist()], dtype=torch.int64)

    def accepts(self, p: float, q: float, coin: float) -> bool:
        """In the place of `rejection_walk._accepts`."""
        probability = min(1.0, p / q)
        return bool(self._choose([1 - probability, probability]))

    def _accept(self, p: Tensor, q: Tensor) -> Tensor:
        probabilities = acceptance_probability(p, q)
        flat = [float(self._choose([1 - a, a])) for a in probabilities.flatten().tolist()]
        return torch.tensor(flat, dtype=torch.float64).view_as(probabilities)

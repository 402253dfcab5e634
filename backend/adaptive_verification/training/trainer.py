"""Trains a drafter for so many minutes, and can be stopped and continued at any time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.training.batches import Batch, epochs
from adaptive_verification.training.objective import Objective, loss
from adaptive_verification.training.shards import CollectedSequence

_CHECKPOINT = "checkpoint.pt"
_SOLVED_SHARE = 0.1
"""Of the learning rate for what the closed form has solved already."""


@dataclass(frozen=True)
class TrainingOptions:
    """How to train."""

    minutes: float
    """Of training, over all runs of one checkpoint directory."""
    learning_rate: float = 6e-4
    weight_decay: float = 0.05
    batch_tokens: int = 2048
    warmup_share: float = 0.03
    """Of `minutes`; the learning rate then falls along a cosine to a twentieth."""
    state_noise: float = 0.05
    """Noise on the states in training, relative to their spread: drafts see imperfect ones."""
    seed: int = 0
    checkpoint_seconds: float = 120.0


class CurvePoint(NamedTuple):
    """Expected acceptance on text that is not trained on, at some time."""

    written_tokens: int
    seconds: float
    overlap: list[float]
    """By position, at temperature 1."""


@dataclass
class Progress:
    """How far training is."""

    seconds: float = 0.0
    steps: int = 0
    written_tokens: int = 0
    """Trained on, those of repeated epochs included."""
    epoch: int = 0
    overlap: list[float] = field(default_factory=list)
    """Running mean of the expected acceptance at each trained depth."""
    curve: list[CurvePoint] = field(default_factory=list)
    """What training brought so far, at every checkpoint."""


class Trainer:
    """One training run over collected sequences."""

    def __init__(
        self,
        network: HiddenStateNetwork,
        sequences: Sequence[CollectedSequence],
        options: TrainingOptions,
        objective: Objective,
        directory: Path,
        watch: Callable[[], list[float]] | None = None,
    ) -> None:
        """Continues from the checkpoint in `directory`, if there is one.

        Args:
            watch: gives the overlap by position on other text; called at every checkpoint.
        """
        self.network = network
        self.progress = Progress()
        self._sequences = sequences
        self._options = options
        self._objective = objective
        self._checkpoint = directory / _CHECKPOINT
        self._device = network.embedding.device
        self._watch = watch
        linear_guess = [*network.from_token.parameters(), *network.from_target.parameters()]
        linear_guess += network.from_own.parameters()
        solved = {id(parameter) for parameter in linear_guess}
        learned = [parameter for parameter in network.parameters() if id(parameter) not in solved]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in learned if p.dim() > 1], "weight_decay": options.weight_decay, "share": 1.0},
                {"params": [p for p in learned if p.dim() <= 1], "weight_decay": 0.0, "share": 1.0},
                {"params": linear_guess, "weight_decay": 0.0, "share": _SOLVED_SHARE},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
        )
        if self._checkpoint.exists():
            self._restore()

    def run(self, report: Callable[[Progress], None]) -> None:
        """Trains until the minutes are over; `report` is called after every step. Interrupted, it keeps what it has."""
        self.network.train()
        if not self.progress.curve:
            self._look()
        if self._done() < 1:
            try:
                self._train(report)
            except KeyboardInterrupt:
                self._save()
                raise
            self._look()
            self._save()
        self.network.eval()

    def _done(self) -> float:
        """The share of the minutes that is over."""
        return self.progress.seconds / (60 * self._options.minutes)

    def _train(self, report: Callable[[Progress], None]) -> None:
        options, progress = self._options, self.progress
        generator = torch.Generator(self._device).manual_seed(options.seed + progress.steps)
        batches = epochs(
            self._sequences,
            batch_tokens=options.batch_tokens,
            hidden_size=self.network.hidden_size,
            seed=options.seed + progress.steps,
        )
        first_epoch, before = progress.epoch, progress.seconds
        started = saved = time.monotonic()
        for epoch, batch in batches:
            if self._done() >= 1:
                return
            overlap = self._step(batch.to(self._device), generator)
            self._note(batch.num_written, overlap, first_epoch + epoch, before + time.monotonic() - started)
            report(progress)
            if time.monotonic() - saved > options.checkpoint_seconds:
                before_look = time.monotonic()
                self._look()
                self._save()
                saved = time.monotonic()
                started += saved - before_look

    def _step(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """One step of the optimizer; the overlap of each of its passes."""
        options = self._options
        for group in self._optimizer.param_groups:
            group["lr"] = group["share"] * options.learning_rate * _schedule(self._done(), options.warmup_share)
        noisy = _with_noise(batch.previous_states, options.state_noise, generator)
        depth = self._objective.depths[self.progress.steps % len(self._objective.depths)]
        value, overlap = loss(self.network, batch.with_previous_states(noisy), self._objective, depth)
        self._optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        return overlap

    def _note(self, written: int, overlap: Tensor, epoch: int, seconds: float) -> None:
        progress = self.progress
        progress.steps += 1
        progress.written_tokens += written
        progress.epoch = epoch
        progress.seconds = seconds
        for depth, value in enumerate(overlap.tolist()):
            if depth == len(progress.overlap):
                progress.overlap.append(value)
            progress.overlap[depth] += 0.03 * (value - progress.overlap[depth])

    def _look(self) -> None:
        """Adds a point to the curve; its time is not training time."""
        if self._watch is not None:
            self.network.eval()
            progress = self.progress
            progress.curve.append(CurvePoint(progress.written_tokens, progress.seconds, self._watch()))
            self.network.train()

    def _save(self) -> None:
        temporary = self._checkpoint.with_suffix(".partial")
        content = {
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": json.dumps(asdict(self.progress)),
        }
        torch.save(content, temporary)
        temporary.replace(self._checkpoint)

    def _restore(self) -> None:
        content = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        self.network.load_state_dict(content["network"])
        self._optimizer.load_state_dict(content["optimizer"])
        self.progress = Progress(**json.loads(content["progress"]))
        self.progress.curve = [CurvePoint(*point) for point in self.progress.curve]


def _schedule(done: float, warmup_share: float) -> float:
    """Learning rate by the share of training that is done, relative to the largest."""
    if done < warmup_share:
        return (done + 1e-3) / (warmup_share + 1e-3)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (done - warmup_share) / (1 - warmup_share)))


def _with_noise(states: Tensor, relative: float, generator: torch.Generator) -> Tensor:
    if not relative:
        return states
    noise = torch.randn(states.shape, generator=generator, device=states.device)
    return states + noise * (relative * states.std(dim=-1, keepdim=True))

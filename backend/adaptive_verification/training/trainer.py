"""Trains a drafter for so many minutes, and can be stopped and continued at any time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.training.batches import epochs
from adaptive_verification.training.objective import Objective, loss
from adaptive_verification.training.shards import CollectedSequence

_CHECKPOINT = "checkpoint.pt"


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


class Trainer:
    """One training run over collected sequences."""

    def __init__(
        self,
        network: HiddenStateNetwork,
        sequences: Sequence[CollectedSequence],
        options: TrainingOptions,
        objective: Objective,
        directory: Path,
    ) -> None:
        """Continues from the checkpoint in `directory`, if there is one."""
        self.network = network
        self.progress = Progress()
        self._sequences = sequences
        self._options = options
        self._objective = objective
        self._checkpoint = directory / _CHECKPOINT
        self._device = network.embedding.device
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
        )
        if self._checkpoint.exists():
            self._restore()

    def run(self, report: Callable[[Progress], None]) -> None:
        """Trains until the minutes are over; `report` is called after every step."""
        options = self._options
        generator = torch.Generator(self._device).manual_seed(options.seed + self.progress.steps)
        started, before = time.monotonic(), self.progress.seconds
        saved = started
        self.network.train()
        batches = epochs(
            self._sequences,
            batch_tokens=options.batch_tokens,
            hidden_size=self.network.embedding.shape[1],
            seed=options.seed + self.progress.steps,
        )
        first_epoch = self.progress.epoch
        for epoch, batch in batches:
            done = self.progress.seconds / (60 * options.minutes)
            if done >= 1:
                break
            for group in self._optimizer.param_groups:
                group["lr"] = options.learning_rate * _schedule(done, options.warmup_share)
            batch = batch.to(self._device)
            noisy = _with_noise(batch.previous_states, options.state_noise, generator)
            depth = 1 + self.progress.steps % self._objective.depth
            value, overlap = loss(self.network, batch.with_previous_states(noisy), self._objective, depth, generator)
            self._optimizer.zero_grad(set_to_none=True)
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self._optimizer.step()
            self._note(batch.num_written, overlap, first_epoch + epoch, before + time.monotonic() - started)
            report(self.progress)
            if time.monotonic() - saved > options.checkpoint_seconds:
                self._save()
                saved = time.monotonic()
        self._save()
        self.network.eval()

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

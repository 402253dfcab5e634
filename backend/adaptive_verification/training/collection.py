"""The target writes the training text: many sequences at once, continuously batched, hidden states kept.

It runs the verifier's own packed forward, so a state here is the state that the drafter will be sent in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.row import Row
from adaptive_verification.sampling import noise
from adaptive_verification.sampling.truncation import Candidates
from adaptive_verification.training.jobs import USER_SAMPLING, Job, Sampling
from adaptive_verification.training.shards import CollectedSequence
from adaptive_verification.verification.target_distribution import TargetDistribution


@dataclass
class _Live:
    job: Job
    slot: int
    tokens: list[int]
    pending: list[int]
    """Tokens that the cache does not hold yet."""
    in_user_turn: bool
    num_written: int = 0
    log_normalizers: list[Tensor] = field(default_factory=list)

    @property
    def sampling(self) -> Sampling:
        return USER_SAMPLING if self.in_user_turn else self.job.sampling


class Collector:
    """Continues jobs with the target.

    Args:
        model: made with `hidden_layers`; its slots are how many sequences run at once.
        end_tokens: tokens that end a turn.
        handover: what stands between a user's turn and the answer, see `ChatFrame`; empty without a chat template.
        max_new_tokens: of each turn.
        max_prompt_tokens_per_step: new sequences wait when a step's prompts would exceed it.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        end_tokens: frozenset[int],
        handover: list[int],
        max_new_tokens: int,
        max_prompt_tokens_per_step: int = 1024,
    ) -> None:
        self._model = model
        self._end_tokens = end_tokens
        self._handover = handover
        self._max_new_tokens = max_new_tokens
        self._max_prompt_tokens_per_step = max_prompt_tokens_per_step
        self._free_slots = list(range(model.num_slots))
        self._live: list[_Live] = []

    def run(self, jobs: Iterator[Job], keep_going: Callable[[], bool]) -> Iterator[CollectedSequence]:
        """Yields sequences as they are finished, until `keep_going` says no; what is unfinished then is dropped."""
        while keep_going():
            self._admit(jobs)
            if not self._live:
                return
            yield from self._step()

    def _admit(self, jobs: Iterator[Job]) -> None:
        room = self._max_prompt_tokens_per_step
        while self._free_slots and room > 0:
            job = next(jobs, None)
            if job is None:
                return
            room -= len(job.tokens)
            self._live.append(
                _Live(job, self._free_slots.pop(), list(job.tokens), list(job.tokens), job.answers_itself)
            )

    @torch.inference_mode()
    def _step(self) -> list[CollectedSequence]:
        live = sorted(self._live, key=lambda sequence: sequence.slot)
        rows = [
            Row(sequence.slot, len(sequence.tokens) - len(sequence.pending), len(sequence.pending)) for sequence in live
        ]
        token_ids = torch.tensor([token for sequence in live for token in sequence.pending])
        logits = self._model.forward(token_ids, rows, None)
        next_tokens, log_normalizers = self._sample(logits, live)
        for sequence, row, token, log_normalizer in zip(live, rows, next_tokens, log_normalizers, strict=True):
            self._append(sequence, token, log_normalizer, row.query_length)
        finished = [sequence for sequence in live if self._is_finished(sequence)]
        self._live = [sequence for sequence in live if not self._is_finished(sequence)]
        self._free_slots += [sequence.slot for sequence in finished]
        return [self._collected(sequence) for sequence in finished]

    def _sample(self, logits: Tensor, live: list[_Live]) -> tuple[list[int], Tensor]:
        """The next token of each sequence, and the log-normalizers `[rows]` of its distribution at temperature 1."""
        device = logits.device
        samplings = [sequence.sampling for sequence in live]
        zeros = torch.zeros(len(live), dtype=torch.int64, device=device)
        places = torch.arange(len(live), device=device)
        p = TargetDistribution(
            logits,
            torch.tensor([sampling.temperature for sampling in samplings], device=device),
            zeros,
            torch.tensor([sampling.top_p for sampling in samplings], device=device),
        )
        seeds = torch.tensor([sequence.job.number for sequence in live], device=device)
        positions = torch.tensor([len(sequence.tokens) for sequence in live], device=device)
        uniforms = noise.uniform(seeds, positions, 0, noise.FINAL)
        nothing_drafted = Candidates(zeros[:, None], zeros[:, None].to(torch.float64))
        drawn = p.draw_final(places, zeros.bool(), nothing_drafted, uniforms)
        return drawn.tolist(), logits.float().logsumexp(-1).cpu()

    def _append(self, sequence: _Live, token: int, log_normalizer: Tensor, num_computed: int) -> None:
        sequence.log_normalizers += [torch.full((num_computed - 1,), torch.nan), log_normalizer[None]]
        sequence.tokens.append(token)
        sequence.pending = [token]
        sequence.num_written += 1
        turn_is_over = token in self._end_tokens or sequence.num_written >= self._max_new_tokens
        if sequence.in_user_turn and turn_is_over:
            sequence.in_user_turn = False
            sequence.num_written = 0
            # the turn's end is the hand-over's first token, unless the turn was cut
            given = self._handover[1:] if token == self._handover[0] else self._handover
            sequence.tokens += given
            sequence.pending += given

    def _is_finished(self, sequence: _Live) -> bool:
        if len(sequence.tokens) + len(self._handover) >= self._model.capacity:
            return True
        if sequence.in_user_turn or sequence.num_written == 0:
            return False
        return sequence.tokens[-1] in self._end_tokens or sequence.num_written >= self._max_new_tokens

    def _collected(self, sequence: _Live) -> CollectedSequence:
        log_normalizer = torch.cat(sequence.log_normalizers)
        positions = torch.arange(len(log_normalizer))  # all that are computed
        states = self._model.hidden_states(torch.full_like(positions, sequence.slot), positions)
        return CollectedSequence(
            job=sequence.job.number,
            tokens=torch.tensor(sequence.tokens, dtype=torch.int32),
            states=states.to("cpu", torch.bfloat16),
            log_normalizer=log_normalizer,
        )

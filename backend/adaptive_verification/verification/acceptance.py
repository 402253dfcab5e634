"""Acceptance of a whole step: which drafts of which rows the target accepts, and the one token after them.

Each row is decided as it asks, by rejection (here; the arithmetic is in `rejection`) or by coupling (`coupled`). The
distributions are in `target_distribution`. What is behind a rejection does not matter, so blocks may be decided in
waves: the first drafts of all rows, then the next ones of the rows that accepted all so far.

On a CPU rejection takes one row after the other instead (`rejection_walk`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_verification.contract import COUPLED, REJECTION
from adaptive_verification.ragged import mask, select
from adaptive_verification.sampling import noise
from adaptive_verification.sampling.truncation import Candidates
from adaptive_verification.verification.block import Block, PaddedBlock, Wave, positions_of
from adaptive_verification.verification.coupled import decide_coupled
from adaptive_verification.verification.rejection import acceptance_probability, accepted_prefix
from adaptive_verification.verification.rejection_walk import walk
from adaptive_verification.verification.target_distribution import TargetDistribution


@dataclass(frozen=True)
class Accepted:
    """What the target decided."""

    accepted: Tensor  # [rows] int64, drafts accepted
    output_tokens: Tensor  # [sum(accepted + 1)] int64, end to end
    log_probs: Tensor  # [sum(accepted + 1)] float32, of the untransformed distribution; NaN where not wanted


def accept(logits: Tensor, block: Block, *, wave_length: int | None = None) -> Accepted:
    """Runs acceptance.

    Args:
        logits: `[sum(admitted + 1), vocab]`: for each row the position of each admitted draft, and the one after them.
        wave_length: decide in waves on a CPU too, so many positions of a row at a time. It changes no distribution,
            and no decision about a draft. By default waves have one position where that is dear (on a CPU, of rows
            that are not greedy), else all.
    """
    admitted = block.admitted[block.sampling]
    num_rows, num_drafts = len(admitted), int(admitted.max())
    admitted = admitted.to(logits.device)
    first_position = (admitted + 1).cumsum(0) - (admitted + 1)  # [rows]
    accepted = torch.zeros_like(admitted)
    tokens = admitted.new_zeros(num_rows, num_drafts + 1)
    log_probs = torch.full_like(tokens, torch.nan, dtype=torch.float32)
    rows = torch.arange(num_rows, device=logits.device)  # those that have accepted everything so far
    if wave_length is None:
        wave_length = num_drafts + 1
        if logits.device.type == "cpu":
            by_rejection = block.acceptance[block.sampling] == REJECTION
            walk(logits, block, first_position, rows[by_rejection], accepted, tokens, log_probs)
            rows = rows[~by_rejection]
            if len(rows) and bool((block.temperature[block.sampling][rows] > 0).any()):
                wave_length = 1
    if len(rows):
        _decide_in_waves(logits, block.padded, first_position, rows, wave_length, accepted, tokens, log_probs)
    is_output = mask(accepted + 1, num_drafts + 1)
    return Accepted(accepted, tokens[is_output], log_probs[is_output])


def _decide_in_waves(
    logits: Tensor,
    block: PaddedBlock,
    first_position: Tensor,
    rows: Tensor,
    wave_length: int,
    accepted: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
) -> None:
    """Decides about some rows. `accepted`, `tokens` and `log_probs` receive the results, as in `walk`."""
    num_drafts = tokens.shape[1] - 1
    some_want_log_probs = bool(block.wants_log_probs.any())
    for start in range(0, num_drafts + 1, wave_length):
        if len(rows) == 0:
            break
        wave = block.wave(rows, start, min(wave_length, num_drafts + 1 - start))
        is_position = mask(wave.num_positions, wave.length)  # [rows, length]
        positions = positions_of(first_position[rows] + start, wave.length)[is_position]
        row = rows.repeat_interleave(wave.num_positions)
        target = TargetDistribution(
            select(logits, positions), block.temperature[row], block.top_k[row], block.top_p[row]
        )
        accepted_here, tokens_here = _decide(target, wave)

        is_output = mask(accepted_here + 1, wave.length) & is_position
        outputs = tokens_here[is_output]
        row, place = is_output.nonzero(as_tuple=True)
        tokens[rows[row], start + place] = outputs
        if some_want_log_probs:
            wanted = block.wants_log_probs[rows[row]]
            row, place = row[wanted], place[wanted]
            wanted_log_probs = target.log_probs(wave.first_position[row] + place, outputs[wanted])
            log_probs[rows[row], start + place] = wanted_log_probs
        accepted[rows] += accepted_here
        rows = rows[accepted_here == wave.length]


def _decide(target: TargetDistribution, wave: Wave) -> tuple[Tensor, Tensor]:
    """`[rows]` accepted drafts and `[rows, length]` output tokens of a wave's rows, each by its own method."""
    accepted = torch.zeros_like(wave.num_drafts)
    tokens = torch.zeros_like(wave.draft_tokens)
    for method, decide in ((REJECTION, decide_by_rejection), (COUPLED, decide_coupled)):
        rows = (wave.acceptance == method).nonzero().squeeze(-1)
        if len(rows) == len(accepted):
            return decide(target, wave, wave.first_position)
        if len(rows):
            accepted[rows], tokens[rows] = decide(target, wave.select(rows), wave.first_position[rows])
    return accepted, tokens


def decide_by_rejection(target: TargetDistribution, wave: Wave, first_position: Tensor) -> tuple[Tensor, Tensor]:
    """Decides about rows that accept by rejection. Arguments and result as in `coupled.decide_coupled`."""
    tokens = wave.draft_tokens.clone()
    accepted = torch.zeros_like(wave.num_drafts)
    is_draft = mask(wave.num_drafts, wave.length)  # [rows, length]
    if bool(is_draft.any()):
        positions = positions_of(first_position, wave.length)
        p = torch.zeros_like(tokens, dtype=torch.float64)
        p[is_draft] = target.probability_of(positions[is_draft], tokens[is_draft])
        q = torch.where(wave.q_ids == tokens.unsqueeze(-1), wave.q_probs, 0.0).sum(-1)  # [rows, length]
        depth = torch.arange(wave.start, wave.start + wave.length, device=tokens.device)
        coin = noise.uniform(wave.seed.unsqueeze(-1), wave.block.unsqueeze(-1), depth, noise.ACCEPT)
        accepted = accepted_prefix(coin < acceptance_probability(p, q), wave.num_drafts)

    rows = (accepted < wave.num_positions).nonzero().squeeze(-1)  # those that end here
    if len(rows):
        place = accepted[rows]
        tokens[rows, place] = target.draw_final(
            positions=first_position[rows] + place,
            rejected=place < wave.num_drafts[rows],
            q=Candidates(wave.q_ids[rows, place], wave.q_probs[rows, place]),
            uniforms=noise.uniform(wave.seed[rows], wave.block[rows], wave.start + place, noise.FINAL),
        )
    return accepted, tokens

"""What a drafter is trained for: to be accepted, at every depth, given its own earlier states.

A draft is accepted with probability sum(min(p, q)), so 1 minus that (the total variation) is the loss that matters; the
cross-entropy of q under p has better gradients where q is still far from p, and the distance to the target's own state
(EAGLE's first objective) says more per token of text. The objective mixes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.training.batches import Batch
from adaptive_verification.training.unrolled_attention import Unrolling


@dataclass(frozen=True)
class Objective:
    """Weights of the parts of the loss, and how much of it is computed."""

    depths: tuple[int, ...] = (1, 2, 1)
    """Passes of the steps, in turn: drafts in a row that are trained. Each pass costs as much as the first."""
    depth_decay: float = 0.8
    """Weight of each pass relative to the one before: deeper drafts are reached less often."""
    overlap_weight: float = 1.0
    """Of the total variation, beside a cross-entropy of weight 1."""
    state_weight: float = 1.0
    """Of the squared distance to the target's own state, relative to its square: cheap, and it says more per token."""


def loss(network: HiddenStateNetwork, batch: Batch, objective: Objective, depth: int) -> tuple[Tensor, Tensor]:
    """The training loss over `depth` passes, and the mean overlap of each.

    Returns:
        (scalar, `[depth]` without gradient).
    """
    where = batch.is_written
    targets = batch.target_states[where]
    with torch.no_grad():
        # target probabilities of the draft vocabulary: what lies outside is out of reach, and stays missing
        log_p = network.logits(targets) - batch.log_normalizer[where].unsqueeze(-1)
        p = log_p.exp()  # [positions, draft vocabulary]
    total = p.new_zeros(())
    overlaps = []
    for number, hidden in enumerate(unrolled(network, batch, depth)):
        drafted = hidden[where]
        log_q = network.logits(drafted).log_softmax(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        cross_entropy = -(p * log_q).sum(-1).mean()
        distance = (drafted - targets).square().mean() / targets.square().mean()
        total = total + objective.depth_decay**number * (
            cross_entropy - objective.overlap_weight * overlap + objective.state_weight * distance
        )
        overlaps.append(overlap.detach())
    return total, torch.stack(overlaps)


def unrolled(network: HiddenStateNetwork, batch: Batch, depth: int) -> list[Tensor]:
    """The network's hidden states `[B, S, hidden]` of each pass, see `unrolled_attention`."""
    context = network.context_of_target(batch.previous_states)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    unrolling = Unrolling()
    passes = []
    for _ in range(depth):
        hidden = network(batch.tokens, context, positions, unrolling=unrolling)
        passes.append(hidden)
        context = torch.nn.functional.pad(network.context_of_own(hidden[:, :-1]), (0, 0, 1, 0))
    return passes

"""How often a drafter's drafts would be accepted, in expectation, on sequences that it was not trained on.

The expectation is exact at each place: the sum over the vocabulary of min(p, q), p and q as a request with these
settings has them. Draft i of a block is judged where the i - 1 drafts before it were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.sampling.truncation import Candidates, scale, truncate
from adaptive_verification.training.batches import make_batch
from adaptive_verification.training.jobs import Sampling
from adaptive_verification.training.objective import unrolled
from adaptive_verification.training.shards import CollectedSequence

_SEQUENCES_AT_ONCE = 8
_PLACES_AT_ONCE = 256


@dataclass(frozen=True)
class Acceptance:
    """Expected acceptance of drafts under one sampling setting."""

    sampling: Sampling
    by_position: list[float]
    """Of the draft at each position of a block, given that those before it were accepted."""
    num_places: int

    def tokens_per_step(self, num_draft_tokens: int) -> float:
        """Expected tokens of a step that verifies so many drafts, as if positions were independent."""
        reach, total = 1.0, 1.0
        for probability in self.by_position[:num_draft_tokens]:
            reach *= probability
            total += reach
        return total


@torch.inference_mode()
def evaluate(
    network: HiddenStateNetwork,
    full_head: Tensor,
    sequences: Sequence[CollectedSequence],
    sampling: Sampling,
    *,
    depth: int,
    draft_top_k: int,
    report: Callable[[int], object] = lambda places: None,
) -> Acceptance:
    """Expected acceptance over all places that the target wrote.

    Args:
        full_head: `[vocabulary, hidden]`, the target's.
        sequences: collected with this sampling.
        draft_top_k: as the server's setting.
        report: called with the number of places as they are done.
    """
    totals = torch.zeros(depth, dtype=torch.float64)
    num_places = 0
    ordered = sorted(sequences, key=lambda sequence: len(sequence.tokens))
    for start in range(0, len(ordered), _SEQUENCES_AT_ONCE):
        batch = make_batch(ordered[start : start + _SEQUENCES_AT_ONCE], network.embedding.shape[1])
        batch = batch.to(full_head.device)
        where = batch.is_written
        places = int(where.sum())
        passes = [hidden[where].split(_PLACES_AT_ONCE) for hidden in unrolled(network, batch, depth)]
        for number, targets in enumerate(batch.target_states[where].split(_PLACES_AT_ONCE)):
            p = _dense(targets @ full_head.T, sampling)
            for position in range(depth):
                q = _candidates(network.logits(passes[position][number]), sampling, draft_top_k)
                totals[position] += torch.minimum(p.gather(-1, network.token_ids[q.ids]), q.probs).sum().cpu()
        num_places += places
        report(places)
    return Acceptance(sampling, (totals / max(num_places, 1)).tolist(), num_places)


def _dense(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[rows, vocab]` probabilities, float64."""
    if sampling.temperature > 0 and sampling.top_p == 1:
        return (logits.float() / sampling.temperature).softmax(-1).to(torch.float64)
    kept = _candidates(logits, sampling, 0)
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, kept.ids, kept.probs)


def _candidates(logits: Tensor, sampling: Sampling, top_k: int) -> Candidates:
    n = len(logits)
    temperature = torch.full((n,), sampling.temperature, device=logits.device)
    top_p = torch.full((n,), sampling.top_p, device=logits.device)
    at_most = torch.full((n,), top_k, device=logits.device)
    return truncate(scale(logits.float(), temperature), temperature, at_most, top_p)

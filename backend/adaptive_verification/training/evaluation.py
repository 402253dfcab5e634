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
from adaptive_verification.estimation.features import logit_q_max
from adaptive_verification.sampling.truncation import Candidates, scale, truncate
from adaptive_verification.training.batches import make_batch
from adaptive_verification.training.jobs import Sampling
from adaptive_verification.training.objective import unrolled
from adaptive_verification.training.shards import CollectedSequence

_SEQUENCES_AT_ONCE = 8
_PLACES_AT_ONCE = 256


@dataclass(frozen=True)
class Acceptance:
    """Expected acceptance of drafts under one sampling setting, at each place and position of a block, given that the
    drafts before it were accepted."""

    sampling: Sampling
    overlap: Tensor
    """`[places, depth]` float64, the sum of min(p, q)."""
    log_odds: Tensor
    """`[places, depth]` float32, of the drafter's most likely token, as the server's drafter sends them."""

    @property
    def num_places(self) -> int:
        return len(self.overlap)

    @property
    def by_position(self) -> list[float]:
        """The mean over the places."""
        means: list[float] = (self.overlap.sum(0) / max(self.num_places, 1)).tolist()
        return means

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
    overlaps, log_odds = [torch.zeros(0, depth, dtype=torch.float64)], [torch.zeros(0, depth)]
    ordered = sorted(sequences, key=lambda sequence: len(sequence.tokens))
    for start in range(0, len(ordered), _SEQUENCES_AT_ONCE):
        batch = make_batch(ordered[start : start + _SEQUENCES_AT_ONCE], network.embedding.shape[1])
        batch = batch.to(full_head.device)
        where = batch.is_written
        places = int(where.sum())
        passes = [hidden[where].split(_PLACES_AT_ONCE) for hidden in unrolled(network, batch, depth)]
        for number, targets in enumerate(batch.target_states[where].split(_PLACES_AT_ONCE)):
            p = _dense(targets @ full_head.T, sampling)
            by_position = []
            for position in range(depth):
                logits = _scaled(network.logits(passes[position][number]), sampling)
                q = _candidates(logits, sampling, draft_top_k)
                overlap = torch.minimum(p.gather(-1, network.token_ids[q.ids]), q.probs).sum(-1)
                by_position.append((overlap.cpu(), logit_q_max(logits).cpu()))
            overlaps.append(torch.stack([overlap for overlap, _ in by_position], -1))
            log_odds.append(torch.stack([odds for _, odds in by_position], -1))
        report(places)
    return Acceptance(sampling, torch.cat(overlaps), torch.cat(log_odds))


def _dense(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[rows, vocab]` probabilities, float64."""
    if sampling.temperature > 0 and sampling.top_p == 1:
        return (logits.float() / sampling.temperature).softmax(-1).to(torch.float64)
    return _candidates(_scaled(logits, sampling), sampling, 0).dense(logits.shape[-1])


def _scaled(logits: Tensor, sampling: Sampling) -> Tensor:
    return scale(logits.float(), torch.full((len(logits),), sampling.temperature, device=logits.device))


def _candidates(scaled: Tensor, sampling: Sampling, top_k: int) -> Candidates:
    n = len(scaled)
    temperature = torch.full((n,), sampling.temperature, device=scaled.device)
    top_p = torch.full((n,), sampling.top_p, device=scaled.device)
    at_most = torch.full((n,), top_k, device=scaled.device)
    return truncate(scaled, temperature, at_most, top_p)

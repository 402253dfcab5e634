"""The linear start of training recovers a linear law, and never loses to nothing."""

from __future__ import annotations

import torch
from tests.tiny_models import CONFIGS, VOCAB_SIZE, tiny_model
from tests.unit.drafting.test_hidden_state_model import HIDDEN_SIZE, TOKEN_IDS

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork, NetworkShape, normalized
from adaptive_verification.training.closed_form import fit_linear_guess
from adaptive_verification.training.shards import CollectedSequence


def test_a_linear_law_of_the_states_is_found_for_drafts_and_for_drafts_after_drafts() -> None:
    generator = torch.Generator().manual_seed(0)
    network = HiddenStateNetwork(NetworkShape((3,), 1), tiny_model(CONFIGS["llama"]), TOKEN_IDS)
    by_token, by_state = (torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator) for _ in range(2))
    sequences = []
    for number in range(40):
        # a walk: what a token adds to the state is not independent of the state before
        tokens = torch.randint(0, 3, (60,), generator=generator).cumsum(0).remainder(VOCAB_SIZE)
        rows = [torch.randn(HIDDEN_SIZE, generator=generator)]
        for token in tokens[1:-1].tolist():
            embedded = normalized(network.embedding[token])
            rows.append(embedded @ by_token + normalized(rows[-1]) @ by_state + 0.5)
        sequences.append(CollectedSequence(number, tokens.int(), torch.stack(rows), torch.zeros(59)))
    fit_linear_guess(network, sequences)
    states, tokens = sequences[0].states, sequences[0].tokens.long()
    with torch.no_grad():
        embedded = network.from_token(normalized(network.embedding[tokens[1:-1]]))
        first = embedded + network.context_of_target(states[:-1])
        second = embedded[1:] + network.context_of_own(first[:-1])

    def unexplained(predicted: torch.Tensor, actual: torch.Tensor) -> float:
        return float((predicted - actual).square().mean() / actual.var())

    assert unexplained(first, states[1:]) < 0.01
    assert unexplained(second, states[2:]) < 0.02

"""The network of a hidden-state drafter: what runs in the server is what was trained, on several architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_verification.drafting import hidden_state_files
from adaptive_verification.drafting.hidden_state_kind import is_hidden_state_drafter
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork, NetworkShape
from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.causal_model import CausalModel, ModelOptions
from adaptive_verification.forward.hidden_states import decoder_layers
from adaptive_verification.forward.row import Row
from adaptive_verification.training.batches import make_batch
from adaptive_verification.training.objective import unrolled
from adaptive_verification.training.shards import CollectedSequence
from adaptive_verification.training.unrolled_attention import ATTENTION_NAME as UNROLLED

TOKEN_IDS = torch.arange(0, VOCAB_SIZE, 2)
OPTIONS = ModelOptions(torch.float32, torch.device("cpu"), num_slots=4, max_context_tokens=64)
LENGTH = 12
HIDDEN_SIZE = 32


def network_for(target: PreTrainedModel, layers: tuple[int, ...] = (1, 3), num_layers: int = 1) -> HiddenStateNetwork:
    network = HiddenStateNetwork(NetworkShape(layers, num_layers), target, TOKEN_IDS).eval()
    torch.manual_seed(1)
    with torch.no_grad():  # away from its plain start
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def states_of(target: PreTrainedModel, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """transformers' own account of the layers' outputs: `[S, width]`."""
    with torch.inference_mode():
        hidden = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer][0] for layer in layers], dim=-1)


def sequences_for(target: PreTrainedModel, layers: tuple[int, ...]) -> list[CollectedSequence]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (LENGTH, LENGTH - 3):
        tokens = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        states = states_of(target, tokens, layers)[:-1]
        made.append(CollectedSequence(0, tokens.int(), states, torch.zeros(length - 1)))
    return made


def trained_logits(network: HiddenStateNetwork, sequences: list[CollectedSequence], depth: int) -> list[Tensor]:
    """`[sequences, S, draft vocabulary]` of each pass."""
    network.layers.set_attn_implementation(UNROLLED)
    with torch.inference_mode():
        return [network.logits(hidden) for hidden in unrolled(network, make_batch(sequences, HIDDEN_SIZE), depth)]


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize(("layers", "num_layers"), [((3,), 1), ((1, 3), 1), ((1, 2, 3), 2)], ids=str)
def test_packed_drafts_are_the_unrolled_passes_of_training(
    architecture: str, layers: tuple[int, ...], num_layers: int
) -> None:
    target = tiny_model(CONFIGS[architecture])
    network = network_for(target, layers, num_layers)
    sequences = sequences_for(target, layers)
    depth = 4
    trained = trained_logits(network, sequences, depth)
    model = HiddenStateModel(network, OPTIONS)
    slots, confirmed = [2, 0], [6, 4]
    for slot, sequence, length in zip(slots, sequences, confirmed, strict=True):
        positions = torch.arange(length - 1)
        model.write_states(torch.full_like(positions, slot), positions, sequence.states[: length - 1])
    packed = torch.cat([sequence.tokens[:length] for sequence, length in zip(sequences, confirmed, strict=True)])
    logits = model.forward(packed, [Row(slot, 0, length) for slot, length in zip(slots, confirmed, strict=True)], None)
    for number in range(depth):
        for row, length in enumerate(confirmed):
            expected = trained[number][row, length + number - 1]
            torch.testing.assert_close(logits[row], expected, atol=1e-3, rtol=1e-3)
        drafts = torch.stack([s.tokens[length + number] for s, length in zip(sequences, confirmed, strict=True)])
        rows = [Row(slot, length + number, 1) for slot, length in zip(slots, confirmed, strict=True)]
        logits = model.forward(drafts, rows, None)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_training_starts_from_the_targets_last_layers_and_its_final_norm(architecture: str) -> None:
    target = tiny_model(CONFIGS[architecture])
    network = HiddenStateNetwork(NetworkShape((3,), 2), target, TOKEN_IDS)
    for own, last in zip(decoder_layers(network.layers), decoder_layers(target)[-2:], strict=True):
        for name, weight in last.state_dict().items():
            assert torch.equal(own.state_dict()[name], weight), name
    norms = {name: weight for name, weight in target.base_model.state_dict().items() if name.count(".") == 1}
    own_weights = network.layers.state_dict()
    assert [name for name in norms if name in own_weights and torch.equal(own_weights[name], norms[name])]


def test_the_targets_states_replace_those_of_drafts() -> None:
    target = tiny_model(CONFIGS["llama"])
    network = network_for(target)
    (sequence, _) = sequences_for(target, (1, 3))
    trained = trained_logits(network, [sequence], 1)[0][0]
    model = HiddenStateModel(network, OPTIONS)
    slot = torch.zeros(5, dtype=torch.int64)
    model.write_states(slot, torch.arange(5), sequence.states[:5])
    model.forward(sequence.tokens[:6], [Row(0, 0, 6)], None)
    model.forward(sequence.tokens[6:7], [Row(0, 6, 1)], None)  # a draft, from a state of the drafter's own
    model.write_states(slot[:2], torch.tensor([5, 6]), sequence.states[5:7])
    logits = model.forward(sequence.tokens[6:8], [Row(0, 6, 2)], None)
    torch.testing.assert_close(logits[0], trained[7], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_hidden_states_of_a_packed_forward_are_the_models_own(architecture: str) -> None:
    target = tiny_model(CONFIGS[architecture])
    tokens = torch.arange(9)
    expected = states_of(target, tokens, (1, 2, 3))
    model = CausalModel(target, OPTIONS, hidden_layers=(1, 2, 3))
    model.forward(tokens, [Row(1, 0, 5), Row(3, 0, 4)], None)
    states = model.hidden_states(torch.ones(5, dtype=torch.int64), torch.arange(5))
    torch.testing.assert_close(states, expected[:5], atol=1e-4, rtol=1e-4)


def test_a_drafter_survives_being_written_and_read(tmp_path: Path, saved_target: str) -> None:
    network = network_for(tiny_model(CONFIGS["llama"]))
    with torch.no_grad():
        for parameter in network.parameters():  # as the file has them
            parameter.copy_(parameter.to(torch.bfloat16))
    fingerprint = hidden_state_files.tokenizer_fingerprint(saved_target)
    hidden_state_files.save(network, tmp_path / "drafter", fingerprint=fingerprint, trained={"target": "tiny"})
    drafter = str(tmp_path / "drafter")
    assert is_hidden_state_drafter(drafter)
    assert hidden_state_files.hidden_layers_of(drafter) == (1, 3)
    assert not is_hidden_state_drafter(saved_target)
    assert hidden_state_files.hidden_layers_of("first-layers:6") == ()
    loaded = hidden_state_files.load(drafter, saved_target, OPTIONS)
    mine = HiddenStateModel(network, OPTIONS)
    tokens = torch.tensor([5, 7, 11])
    rows = [Row(0, 0, 3)]
    expected = mine.forward(tokens, rows, None)
    torch.testing.assert_close(loaded.forward(tokens, rows, None), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_sha256": "0"}, "another tokenizer"),
        ({"format": 99}, "format 99"),
        ({"num_layers": 2}, "does not fit"),
    ],
    ids=["tokenizer", "version", "shape"],
)
def test_a_drafter_for_another_target_is_refused(
    tmp_path: Path, saved_target: str, change: dict[str, Any], reason: str
) -> None:
    fingerprint = hidden_state_files.tokenizer_fingerprint(saved_target)
    network = network_for(tiny_model(CONFIGS["llama"]))
    hidden_state_files.save(network, tmp_path, fingerprint=fingerprint, trained={})
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason):
        hidden_state_files.load(str(tmp_path), saved_target, OPTIONS)


@pytest.fixture
def saved_target(tmp_path: Path) -> str:
    return save(tmp_path / "target")

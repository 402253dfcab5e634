"""A hidden-state drafter on disk: `config.json`, the weights that are its own, and whose drafter it is.

Embedding and head are the target's and are taken from it at load, so a file holds a few million numbers only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptive_verification.drafting.hidden_state_kind import CONFIG_FILE, MODEL_TYPE, is_hidden_state_drafter
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork, NetworkShape
from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.causal_model import ModelOptions

_FORMAT = 1
_WEIGHTS = "drafter.safetensors"
_TOKEN_IDS = "token_ids"


def tokenizer_fingerprint(target: str) -> str:
    """SHA-256 of the tokenizer's tokens and ids: a drafter trained with others would draft nonsense."""
    vocabulary = sorted(AutoTokenizer.from_pretrained(target).get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def hidden_layers_of(drafter: str) -> tuple[int, ...]:
    """Whose hidden states the drafter of that name needs of the target; none unless it is a hidden-state drafter.

    Raises:
        UnsupportedModel: the directory is of another version.
    """
    return _read_config(drafter)[0].hidden_layers if is_hidden_state_drafter(drafter) else ()


def save(network: HiddenStateNetwork, directory: Path, *, fingerprint: str, trained: dict[str, Any]) -> None:
    """Writes the drafter in bfloat16.

    Args:
        fingerprint: of the target's tokenizer.
        trained: how, for the reader.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in network.state_dict().items()}
    save_file({**weights, _TOKEN_IDS: network.token_ids.to("cpu", torch.int32)}, directory / _WEIGHTS)
    config = {
        "model_type": MODEL_TYPE,
        "format": _FORMAT,
        "hidden_layers": list(network.shape.hidden_layers),
        "num_layers": network.shape.num_layers,
        "tokenizer_sha256": fingerprint,
        "trained": trained,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def load(drafter: str, target: str, options: ModelOptions) -> HiddenStateModel:
    """The drafter, ready for the drafter stage.

    Raises:
        UnsupportedModel: it is of another version, or was trained for another target.
    """
    shape, config = _read_config(drafter)
    if config["tokenizer_sha256"] != tokenizer_fingerprint(target):
        raise UnsupportedModel(f"drafter {drafter} was trained for another tokenizer than that of target {target}")
    weights = load_file(Path(drafter) / _WEIGHTS)
    token_ids = weights.pop(_TOKEN_IDS).to(torch.int64)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=options.dtype)
    network = HiddenStateNetwork(shape, model, token_ids)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UnsupportedModel(f"drafter {drafter} does not fit target {target}: {error}") from None
    return HiddenStateModel(network.to(options.device, options.dtype).eval(), options)


def _read_config(drafter: str) -> tuple[NetworkShape, dict[str, Any]]:
    config = json.loads((Path(drafter) / CONFIG_FILE).read_text())
    if config["format"] != _FORMAT:
        raise UnsupportedModel(f"drafter {drafter} has format {config['format']}; this version reads {_FORMAT}")
    return NetworkShape(tuple(config["hidden_layers"]), config["num_layers"]), config

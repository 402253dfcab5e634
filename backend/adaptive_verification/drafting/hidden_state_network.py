"""The network of a hidden-state drafter: a few decoder layers that continue from the target's own hidden states.

For the token at position t it takes the target's hidden state of position t - 1 (which predicted that token) and the
token's embedding; its output predicts token t + 1, and stands in for the target's hidden state of t when the next draft
is made. Embedding and head are the target's, the head cut to the draft vocabulary. The kind is EAGLE's (Li et al. 2024)
with states of several layers (EAGLE-3, 2025), the cut vocabulary is that of FR-Spec (Zhao et al. 2025).

Only the network: no cache, no sampling, no training. Its layers are those of the target's architecture, so attention
goes through transformers' attention interface, and whoever runs it chooses the attention.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.hidden_states import decoder_layers

_LAYERS_SCALE = 0.1
"""At the start the layers, which know nothing yet, add little to the linear guess."""


@dataclass(frozen=True)
class NetworkShape:
    """What of a hidden-state drafter is not the target's."""

    hidden_layers: tuple[int, ...]
    """Whose hidden states it takes, see `forward.hidden_states`."""
    num_layers: int
    """Its own decoder layers."""


class HiddenStateNetwork(nn.Module):
    """See the module.

    Attributes:
        token_ids: `[draft vocabulary]` int64, the token ids that it can draft.
    """

    def __init__(self, shape: NetworkShape, target: PreTrainedModel, token_ids: Tensor) -> None:
        """Takes embedding, head, and as a start the last layers' weights from the target.

        Raises:
            UnsupportedModel: the target's logits are not its head times its hidden state.
        """
        super().__init__()
        config = target.config.get_text_config()
        self.hidden_size = int(config.hidden_size)
        self.shape = shape
        square = (self.hidden_size, self.hidden_size)
        self.from_token = nn.Linear(*square)
        self.from_target = nn.Linear(len(shape.hidden_layers) * self.hidden_size, self.hidden_size, bias=False)
        self.from_own = nn.Linear(*square, bias=False)
        self.combine = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False)
        self.layers: Any = _decoder(config, target, shape.num_layers)
        self.layers_scale = nn.Parameter(torch.full((self.hidden_size,), _LAYERS_SCALE))
        with torch.no_grad():
            identity = torch.eye(self.hidden_size)
            self.combine.weight.copy_(torch.cat([0.5 * identity, identity], dim=1))
        head: Any = target.get_output_embeddings()
        if getattr(head, "bias", None) is not None or head.weight.shape[1] != self.hidden_size:
            raise UnsupportedModel(f"{type(target).__name__} has a head that a hidden-state drafter cannot share")
        embedding: Any = target.get_input_embeddings()
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("embedding", embedding.weight.detach(), persistent=False)
        self.register_buffer("head", head.weight.detach()[token_ids], persistent=False)
        self.token_ids: Tensor
        self.embedding: Tensor
        self.head: Tensor

    def context_of_target(self, states: Tensor) -> Tensor:
        """The target's states of all `hidden_layers` side by side `[..., width]` -> `[..., hidden]`, as `forward` takes
        them; nothing (zeros) stays nothing."""
        by_layer = states.unflatten(-1, (-1, self.hidden_size))
        context: Tensor = self.from_target(normalized(by_layer).flatten(-2))
        return context

    def context_of_own(self, hidden: Tensor) -> Tensor:
        """The same from the states that `forward` gave."""
        context: Tensor = self.from_own(normalized(hidden))
        return context

    def forward(self, token_ids: Tensor, context: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """Hidden states after each token, which stand in for the target's last ones.

        Args:
            token_ids: `[batch, T]`.
            context: `[batch, T, hidden]`, made of the state before each token: the target's, or this function's.
            position_ids: `[batch, T]`.
            attention: handed to the attention function.
        """
        guess, inputs = self.guess(token_ids, context)
        output = self.layers(inputs_embeds=inputs, position_ids=position_ids, use_cache=False, **attention)
        return self.refined(guess, output.last_hidden_state)

    def guess(self, token_ids: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """A linear guess from the token and the state before it, and what the layers are to look at."""
        embedded = normalized(F.embedding(token_ids, self.embedding))
        return self.from_token(embedded) + context, self.combine(torch.cat([embedded, normalized(context)], dim=-1))

    def refined(self, guess: Tensor, output: Tensor) -> Tensor:
        """The guess and what the layers, after their final norm, add to it."""
        return guess + self.layers_scale * output

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., draft vocabulary]`."""
        return F.linear(hidden, self.head)


def normalized(states: Tensor) -> Tensor:
    """Each state at a root mean square of 1."""
    return F.rms_norm(states, states.shape[-1:], eps=1e-5)


def _decoder(config: PretrainedConfig, target: PreTrainedModel, num_layers: int) -> nn.Module:
    """A decoder of the target's architecture with the weights of its last layers and its final norm."""
    total = int(config.num_hidden_layers)
    if not 1 <= num_layers <= total:
        raise UnsupportedModel(f"num_layers={num_layers} is out of range; the target has {total}")
    own = copy.deepcopy(config)
    own.num_hidden_layers = num_layers
    own.vocab_size, own.pad_token_id = 1, None  # it is fed embeddings
    if getattr(own, "layer_types", None):
        own.layer_types = own.layer_types[-num_layers:]
    decoder = AutoModel.from_config(own)
    decoder.set_input_embeddings(nn.Embedding(1, 1))
    own_weights = decoder.state_dict()
    shared = {
        name: weight
        for name, weight in target.base_model.state_dict().items()
        if name in own_weights and own_weights[name].shape == weight.shape
    }
    # the final norm, whatever it is called; the layers, which are the first ones, come next
    decoder.load_state_dict(shared, strict=False)
    for layer, source in zip(decoder_layers(decoder), decoder_layers(target)[-num_layers:], strict=True):
        layer.load_state_dict(source.state_dict())
    return decoder

"""An unmodified transformers model over packed tokens, through transformers' public attention interface.

The model's layers call the function registered here with their queries, keys and values; the batch writes and attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.hidden_states import HiddenStates

ATTENTION_NAME = "adaptive_verification_ragged"
_REFUSED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")


class Attention(Protocol):
    """What a forward needs to know of a packed batch, see `ragged_attention.RaggedBatch`."""

    capacity: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Queries `[T, heads, key_dim]`, keys and values `[T, kv_heads, ...]` -> `[T, heads, value_dim]`."""


def _ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    ragged: Attention,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[1, heads, T, head_dim]` in, `[1, T, heads, head_dim]` out."""
    for name in _REFUSED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} needs attention with {name}, which is not supported")
    window = arguments.get("sliding_window")
    if window is not None and window < ragged.capacity:
        raise UnsupportedModel(
            f"{type(module).__name__} attends over a sliding window of {window} tokens; "
            f"set max_context_tokens to at most {window}, or use a model with full attention"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return ragged.attend(layer, query, key, value, scale)[None], None


transformers.AttentionInterface.register(ATTENTION_NAME, _ragged_attention)


class TransformersForward:
    """See the module."""

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int]) -> None:
        """Sets the model's attention.

        Args:
            hidden_layers: whose outputs `hidden_states` gives after a forward, see `forward.hidden_states`.

        Raises:
            UnsupportedModel: there is no such layer.
        """
        model.set_attn_implementation(ATTENTION_NAME)
        self.module: nn.Module = model
        self._hidden_states = HiddenStates(model, hidden_layers)

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor) -> Tensor:
        """Tokens and their positions `[T]`, places `[m]` among them -> logits `[m, vocab]` after these."""
        output = self.module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_at,
            ragged=attention,
        )
        logits: Tensor = output.logits[0]
        return logits

    def hidden_states(self) -> Tensor:
        """The last forward's `[T, width]`; the layers side by side."""
        return self._hidden_states.take()


class TransformersDecoder(nn.Module):
    """A model's decoder layers and final norm alone."""

    def __init__(self, decoder: Any) -> None:
        """Sets the decoder's attention."""
        super().__init__()
        decoder.set_attn_implementation(ATTENTION_NAME)
        self.decoder = decoder

    def forward(self, inputs: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Embedded tokens `[T, hidden]` and their positions `[T]` -> `[T, hidden]`."""
        output = self.decoder(
            inputs_embeds=inputs[None], position_ids=positions[None], use_cache=False, ragged=attention
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class _Spy:
    """An attention that only looks at what it is given."""

    capacity = 0

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.seen.add((key.shape[-1], value.shape[-1], key.shape[1]))
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def attention_dimensions(run: Callable[[Attention], object]) -> tuple[int, int, int]:
    """(key dim, value dim, kv heads), seen rather than guessed: from what the layers hand to attention.

    Args:
        run: a forward of one token at position 0.

    Raises:
        UnsupportedModel: the layers differ, or do not come here.
    """
    spy = _Spy()
    with torch.inference_mode():
        run(spy)
    if len(spy.seen) != 1:
        raise UnsupportedModel(f"the model does not have one attention shape in all layers: {sorted(spy.seen)}")
    return spy.seen.pop()

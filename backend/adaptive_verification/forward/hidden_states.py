"""The hidden states of a model's chosen layers, kept from one forward for a drafter that builds on them.

Layer l (1 and up) is the output of the l-th decoder layer; the number of layers itself means what the head sees, after
the final norm. Seen through forward hooks, so that it works with any architecture and the model itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaptive_verification.errors import UnsupportedModel


class HiddenStates:
    """The hidden states of `layers` from the model's last forward."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """Hooks into the model.

        Raises:
            UnsupportedModel: there is no such layer, or the decoder layers cannot be told.
        """
        num_layers = int(model.config.get_text_config().num_hidden_layers)
        refuse_missing_layers(layers, num_layers)
        self._captured: list[Tensor | None] = [None] * len(layers)
        for place, layer in enumerate(layers):
            module = model.base_model if layer == num_layers else decoder_layers(model)[layer - 1]
            module.register_forward_hook(self._keep(place))

    def _keep(self, place: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._captured[place] = output if isinstance(output, Tensor) else output[0]

        return hook

    def take(self) -> Tensor:
        """`[T, width]`, the layers side by side."""
        return torch.cat([tensor[0] for tensor in self._captured if tensor is not None], dim=-1)


def refuse_missing_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raises UnsupportedModel: a layer is none of the model's."""
    for layer in layers:
        if not 1 <= layer <= num_layers:
            raise UnsupportedModel(f"hidden layer {layer} is out of range; the model has layers 1 to {num_layers}")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's list of decoder layers.

    Raises:
        UnsupportedModel: it cannot be told.
    """
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {num_layers} decoder layers")

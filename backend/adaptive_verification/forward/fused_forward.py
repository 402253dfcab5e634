"""Llama-like models with their projections joined: fewer and larger calls, the same numbers up to rounding.

At few tokens a step waits for small calls as long as for arithmetic. Here a layer has four matrix products instead of
seven, and no Python in between but this module's; on a CPU compiled loops do what is between the products
(`between_products`), elsewhere torch. Queries and keys keep their rotary pairs side by side (the projections' rows are
reordered at load), so that a rotation is a multiplication of complex numbers; attention does not notice, as it only
sees their products.

Knows the architectures it can take over; every other model runs as it is, see `transformers_forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
)

from adaptive_verification.forward import between_products, layer_loops
from adaptive_verification.forward.called_products import Handle
from adaptive_verification.forward.hidden_states import refuse_missing_layers
from adaptive_verification.forward.host_floats import Floats, as_array, as_pairs, is_on_host
from adaptive_verification.forward.linear import multiplied_rows, weights_for_loops
from adaptive_verification.forward.ragged_attention import RaggedBatch
from adaptive_verification.forward.transformers_forward import Attention

_DECODERS = (LlamaModel, MistralModel, Qwen2Model)
_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)


def can_fuse_decoder(decoder: nn.Module) -> bool:
    """Whether `FusedDecoder` computes what this one does."""
    if type(decoder) not in _DECODERS:
        return False
    config: Any = decoder.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return bool(config.hidden_act == "silu" and rotary == 1.0)


class FusedDecoder(nn.Module):
    """Decoder layers and final norm."""

    def __init__(self, decoder: nn.Module) -> None:
        """Takes the weights of a decoder for which `can_fuse_decoder` holds, and leaves it as it is."""
        super().__init__()
        source: Any = decoder
        self.layers = nn.ModuleList(_FusedLayer(layer, number) for number, layer in enumerate(source.layers))
        self.norm = _Norm(source.norm)
        self.rotary = source.rotary_emb

    def forward(self, inputs: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Embedded tokens `[T, hidden]`, which are overwritten, and their positions `[T]` -> `[T, hidden]`."""
        output, _ = self.run_layers(inputs, positions, attention)
        normed: Tensor = self.norm(output)
        return normed

    def run_layers(
        self, inputs: Tensor, positions: Tensor, attention: Attention, wanted: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """From embedded tokens `[T, hidden]`, which are overwritten.

        Returns:
            The last layer's output before the final norm, on a CPU in float32; and the outputs of the `wanted` layers,
            1 and up, in the inputs' type.
        """
        cos, sin = self.rotary(inputs[None], positions[None])
        half = cos.shape[-1] // 2  # the second half repeats the first
        rotation = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[:, None]  # [T, 1, head_dim / 2]
        kept = {}
        hidden, forward = inputs, None
        if isinstance(attention, RaggedBatch) and attention.is_on_host:
            hidden = inputs.float()
            first: Any = self.layers[0]
            num_rows = multiplied_rows(first.qkv, len(hidden))
            forward = _HostForward(hidden, inputs.dtype, num_rows, rotation, attention)
        layers: Any = self.layers
        for number, layer in enumerate(layers, start=1):
            if forward is None:
                layer.forward(hidden, rotation, attention)
            else:
                layer.forward_on_host(forward)
            if number in wanted:
                kept[number] = hidden.to(inputs.dtype, copy=True)
        return hidden, kept


class _HostForward:
    """One forward on a CPU, and what its layers use one after the other."""

    def __init__(self, hidden: Tensor, dtype: torch.dtype, num_rows: int, rotation: Tensor, batch: RaggedBatch) -> None:
        """`num_rows`: of the products' inputs, some of which may be nobody's."""
        self.batch = batch
        self.hidden = as_array(hidden)  # [T, hidden], which the layers add to
        cosines, sines = rotation[:, 0].real.contiguous(), rotation[:, 0].imag.contiguous()  # [T, head_dim / 2]
        self.places = between_products.Places(
            cosines.numpy(), sines.numpy(), batch.slot_of_token.numpy(), batch.positions.numpy()
        )
        self.num_tokens = len(hidden)
        self._num_rows, self._dtype = num_rows, dtype
        self._rooms: dict[str, _Room] = {}

    def room(self, name: str, *shape: int) -> _Room:
        """Memory of that name, the same in every layer; `shape`: of each row."""
        room = self._rooms.get(name)
        if room is None:
            tensor = torch.zeros(self._num_rows, *shape, dtype=self._dtype)
            room = self._rooms[name] = _Room(tensor, self.num_tokens)
        return room


class _Room:
    """Memory for a product's input or for queries.

    Attributes:
        tensor: with all rows of the product.
        array: with the tokens', for loops.
    """

    def __init__(self, tensor: Tensor, num_tokens: int) -> None:
        self.tensor = tensor
        self.array = as_array(tensor)[:num_tokens]

    @functools.cached_property
    def rows(self) -> Floats:
        """`array`, row by row."""
        return self.array.reshape(len(self.array), -1)

    @functools.cached_property
    def words(self) -> NDArray[Any]:
        """`array`, as words of two neighbours."""
        return as_pairs(self.array)

    @functools.cached_property
    def handle(self) -> Handle:
        """`tensor`, row by row, for products called by loops."""
        return Handle(self.tensor.flatten(1))


class _FusedLayer(nn.Module):
    def __init__(self, layer: Any, number: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._query_heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self.attention_norm = _Norm(layer.input_layernorm)
        self.qkv = _joined(
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [
                _rotary_pairs_together(self._query_heads, self._head_dim),
                _rotary_pairs_together(self._kv_heads, self._head_dim),
                torch.arange(attention.v_proj.out_features),
            ],
        )
        self.output = _joined([attention.o_proj])
        self.mlp_norm = _Norm(layer.post_attention_layernorm)
        self.gate_and_up = _joined([mlp.gate_proj, mlp.up_proj])
        self.down = _joined([mlp.down_proj])

    def forward(self, hidden: Tensor, rotation: Tensor, attention: Attention) -> None:
        """Adds the layer's two updates to `hidden` `[T, hidden]`.

        Calls its parts' `forward` themselves: at one token, what a module's call does beside that is felt.
        """
        num_tokens, rotated_heads = hidden.shape[0], self._query_heads + self._kv_heads
        qkv = self.qkv.forward(self.attention_norm.forward(hidden)).view(num_tokens, -1, self._head_dim)
        query_and_key = _rotated(qkv[:, :rotated_heads], rotation)
        query, key = query_and_key[:, : self._query_heads], query_and_key[:, self._query_heads :]
        attended = attention.attend(self._number, query, key, qkv[:, rotated_heads:], self._scaling)
        hidden += self.output.forward(attended.reshape(num_tokens, -1))

        gate, up = self.gate_and_up.forward(self.mlp_norm.forward(hidden)).chunk(2, dim=-1)
        hidden += self.down.forward(F.silu(gate).mul_(up))

    def forward_on_host(self, forward: _HostForward) -> None:
        """As `forward`, by compiled loops; these call the products themselves where they can."""
        query = forward.room("query", self._query_heads, self._head_dim)
        attended = forward.room("attended", self._query_heads, self._head_dim)
        called = self._called
        if called is None:
            self._project(forward, query)
            self._attend(forward, query, attended)
            self._update(forward, attended)
        else:
            called.project(forward, forward.batch.cached_words(self._number), query)
            self._attend(forward, query, attended)
            called.update(forward, attended)

    @functools.cached_property
    def _called(self) -> _CalledLayer | None:
        """None where loops cannot call the products."""
        linears = (self.qkv, self.output, self.gate_and_up, self.down)
        qkv, output, gate_and_up, down = (weights_for_loops(linear) for linear in linears)
        if qkv is None or output is None or gate_and_up is None or down is None:
            return None
        return _CalledLayer(self.attention_norm, qkv, output, self.mlp_norm, gate_and_up, down, self.down.in_features)

    def _project(self, forward: _HostForward, query: _Room) -> None:
        """From hidden states to queries; keys and values go to the cache."""
        normed = forward.room("normed", self.attention_norm.size)
        self.attention_norm.write(forward.hidden, normed.array)
        num_tokens, places = forward.num_tokens, forward.places
        qkv = as_array(self.qkv.forward(normed.tensor))[:num_tokens].reshape(num_tokens, -1, self._head_dim)
        words = forward.batch.cached_words(self._number)
        between_products.rotate_and_cache(as_pairs(qkv), *places, *words, query.words)

    def _attend(self, forward: _HostForward, query: _Room, attended: _Room) -> None:
        batch = forward.batch
        batch.attend_in_loops(self._number, query.array, self._scaling, attended.array)
        if batch.has_segmented_rows:
            batch.attend_in_segments(self._number, query.tensor, self._scaling, attended.tensor)

    def _update(self, forward: _HostForward, attended: _Room) -> None:
        """Adds the layer's two updates to the hidden states."""
        num_tokens = forward.num_tokens
        update = self.output.forward(attended.tensor.flatten(1))
        between_products.add(forward.hidden, as_array(update)[:num_tokens])

        normed = forward.room("normed", self.mlp_norm.size)
        self.mlp_norm.write(forward.hidden, normed.array)
        gate_and_up = as_array(self.gate_and_up.forward(normed.tensor))[:num_tokens]
        activated = forward.room("activated", self.down.in_features)
        between_products.activate(gate_and_up, activated.array)
        between_products.add(forward.hidden, as_array(self.down.forward(activated.tensor))[:num_tokens])


class _CalledLayer:
    """What a layer's loops need where they call its products: looked up once, not in every step."""

    def __init__(
        self,
        attention_norm: _Norm,
        qkv: NDArray[np.intp],
        output: NDArray[np.intp],
        mlp_norm: _Norm,
        gate_and_up: NDArray[np.intp],
        down: NDArray[np.intp],
        inner_size: int,
    ) -> None:
        """Takes weights as of `weights_for_loops`; `inner_size` is the feed-forward block's."""
        self._attention_norm, self._mlp_norm = attention_norm.on_host, mlp_norm.on_host
        self._hidden_size, self._inner_size = attention_norm.size, inner_size
        self._qkv, self._output, self._gate_and_up, self._down = qkv, output, gate_and_up, down

    def project(self, forward: _HostForward, words: tuple[NDArray[Any], NDArray[Any]], query: _Room) -> None:
        """As `_FusedLayer._project`; `words` are the layer's keys and values."""
        normed = forward.room("normed", self._hidden_size)
        norm, epsilon = self._attention_norm
        layer_loops.project(
            forward.hidden, norm, epsilon, normed.array, normed.handle.address, self._qkv, *forward.places, *words,
            query.words,
        )  # fmt: skip

    def update(self, forward: _HostForward, attended: _Room) -> None:
        """As `_FusedLayer._update`."""
        normed = forward.room("normed", self._hidden_size)
        activated = forward.room("activated", self._inner_size)
        norm, epsilon = self._mlp_norm
        layer_loops.update(
            forward.hidden, attended.rows, attended.handle.address, self._output, norm, epsilon, normed.array,
            normed.handle.address, self._gate_and_up, activated.array, activated.handle.address, self._down,
        )  # fmt: skip


class _Norm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.size: int = norm.weight.numel()
        self._epsilon: float = norm.variance_epsilon
        self._array = as_array(norm.weight) if is_on_host(norm.weight) else None

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]` in the weight's type."""
        if self._array is None:
            return torch.rms_norm(x, (self.size,), self.weight, self._epsilon)
        normalized = torch.empty(x.shape, dtype=self.weight.dtype)
        self.write(as_array(x.float()), as_array(normalized))
        return normalized

    def write(self, x: Floats, normalized: Floats) -> None:
        """On a CPU: float32 `[T, hidden]` into `[T, hidden]`."""
        between_products.normalize(x, *self.on_host, normalized)

    @property
    def on_host(self) -> tuple[Floats, float]:
        """Weight and epsilon for loops, on a CPU."""
        assert self._array is not None
        return self._array, self._epsilon


def _rotary_pairs_together(num_heads: int, head_dim: int) -> Tensor:
    """Rows of a projection `[heads * head_dim]`: the pairs (i, i + head_dim / 2) of each head side by side."""
    within = torch.arange(head_dim).view(2, -1).t().reshape(-1)
    return (torch.arange(num_heads)[:, None] * head_dim + within).reshape(-1)


def _rotated(heads: Tensor, rotation: Tensor) -> Tensor:
    """`[T, heads, head_dim]`, turned pair by pair; in place where that can be."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(rotation)
        return heads
    turned = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))) * rotation
    return torch.view_as_real(turned).flatten(-2).to(heads.dtype)


def _joined(projections: list[Any], rows: list[Tensor] | None = None) -> nn.Linear:
    """One linear layer whose outputs are those of the given ones, their rows in the given order, end to end."""
    orders = rows or [torch.arange(projection.out_features) for projection in projections]
    pairs = list(zip(projections, orders, strict=True))
    weight = torch.cat([projection.weight.detach()[order] for projection, order in pairs])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if any(projection.bias is not None for projection in projections):
        biases = [
            weight.new_zeros(len(order)) if projection.bias is None else projection.bias.detach()[order]
            for projection, order in pairs
        ]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


class FusedForward:
    """A whole causal language model."""

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int]) -> None:
        """Takes the weights of a model for which `can_fuse` holds, and leaves it as it is.

        Args:
            hidden_layers: as `transformers_forward.TransformersForward`.

        Raises:
            UnsupportedModel: there is no such layer.
        """
        source: Any = model
        self._num_layers = len(source.model.layers)
        refuse_missing_layers(hidden_layers, self._num_layers)
        self._hidden_layers = tuple(hidden_layers)
        self._inner_layers = set(hidden_layers) - {self._num_layers}
        self._decoder = FusedDecoder(source.model)
        self._head = _joined([source.lm_head])
        self._embedding = source.get_input_embeddings()
        self.module: nn.Module = nn.ModuleList([self._decoder, self._head])
        self._kept: dict[int, Tensor] = {}

    @staticmethod
    def can_fuse(model: PreTrainedModel) -> bool:
        """Whether this computes what the model does."""
        return type(model) in _MODELS and can_fuse_decoder(model.base_model)

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor) -> Tensor:
        """As `transformers_forward.TransformersForward`."""
        hidden, self._kept = self._decoder.run_layers(
            self._embedding(token_ids), positions, attention, self._inner_layers
        )
        if self._num_layers in self._hidden_layers:  # what the head sees, as `forward.hidden_states` has it
            self._kept[self._num_layers] = hidden = self._decoder.norm(hidden)
            asked = hidden[logits_at]
        else:
            asked = self._decoder.norm(hidden[logits_at])
        logits: Tensor = self._head(asked)
        return logits

    def hidden_states(self) -> Tensor:
        """As `transformers_forward.TransformersForward`."""
        return torch.cat([self._kept[layer] for layer in self._hidden_layers], dim=-1)

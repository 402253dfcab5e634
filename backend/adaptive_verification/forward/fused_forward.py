"""Llama-like models with their projections joined: fewer and larger calls, the same numbers up to rounding.

At few tokens a step waits for small calls as long as for arithmetic. Here a layer has four matrix products instead of
seven, one rotation for queries and keys together, and no Python in between but this module's. Queries and keys keep
their rotary pairs side by side (the projections' rows are reordered at load), so that a rotation is a multiplication of
complex numbers; attention does not notice, as it only sees their products.

Knows the architectures it can take over; every other model runs as it is, see `transformers_forward`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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

from adaptive_verification.forward import few_tokens
from adaptive_verification.forward.hidden_states import refuse_missing_layers
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
        self.run_layers(inputs, positions, attention)
        normed: Tensor = self.norm(inputs)
        return normed

    def run_layers(
        self, hidden: Tensor, positions: Tensor, attention: Attention, wanted: Collection[int] = ()
    ) -> dict[int, Tensor]:
        """Turns embedded tokens `[T, hidden]` into the last layer's output, in place and before the final norm.

        Returns:
            The outputs of the `wanted` layers, 1 and up.
        """
        cos, sin = self.rotary(hidden[None], positions[None])
        half = cos.shape[-1] // 2  # the second half repeats the first
        rotation = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[:, None]  # [T, 1, head_dim / 2]
        kept = {}
        batch = attention if isinstance(attention, RaggedBatch) and attention.has_few_tokens else None
        few = None if batch is None else _few_tokens(hidden, rotation, batch)
        layers: Any = self.layers
        for number, layer in enumerate(layers, start=1):
            if batch is None:
                layer.forward(hidden, rotation, attention)
            else:
                layer.forward_few(few, batch)
            if number in wanted:
                kept[number] = hidden.clone()
        return kept


def _few_tokens(hidden: Tensor, rotation: Tensor, batch: RaggedBatch) -> few_tokens.FewTokens:
    pairs = torch.view_as_real(rotation[:, 0]).contiguous()  # [T, head_dim / 2, 2]
    arrays = (tensor.numpy() for tensor in (hidden, pairs, batch.slot_of_token, batch.positions))
    return few_tokens.FewTokens(*arrays)


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
        norms = (self.attention_norm, self.mlp_norm)
        self._norms_of_few = [norm.of_few() for norm in norms if norm.is_on_host]

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

    def forward_few(self, few: few_tokens.FewTokens, batch: RaggedBatch) -> None:
        """As `forward`, of few tokens."""
        x, from_numpy = few.hidden, torch.from_numpy
        keys, values = (cached.numpy() for cached in batch.cached(self._number))
        qkv = self.qkv.forward(from_numpy(few_tokens.normalize(x, *self._norms_of_few[0])))
        few_tokens.rotate_and_cache(qkv.numpy(), few.rotation, few.slots, few.positions, keys, values)
        if batch.looks_back_at_little:
            attended = from_numpy(few_tokens.attend(qkv.numpy(), few.slots, few.positions, keys, values, self._scaling))
        else:
            query = qkv.view(len(x), -1, self._head_dim)[:, : self._query_heads]
            attended = batch.attend_cached(self._number, query, self._scaling).reshape(len(x), -1)
        few_tokens.add(x, self.output.forward(attended).numpy())
        gate_and_up = self.gate_and_up.forward(from_numpy(few_tokens.normalize(x, *self._norms_of_few[1]))).numpy()
        few_tokens.add(x, self.down.forward(from_numpy(few_tokens.activate(gate_and_up))).numpy())


class _Norm(nn.Module):
    """x / rms(x) * weight.

    torch makes that of six operations on a CPU, but has one for layer norm. The values of x and of -x together have a
    mean of 0, and the mean square of x as variance: their layer norm is what is wanted, twice.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._size: int = norm.weight.numel()
        self._epsilon: float = norm.variance_epsilon
        self._twice: Tensor | None = None
        self.is_on_host = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32
        if self.is_on_host:
            self._twice = torch.cat([self.weight, self.weight]).detach()

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]`."""
        if self._twice is None:
            return torch.rms_norm(x, (self._size,), self.weight, self._epsilon)
        both = torch.layer_norm(torch.cat([x, -x], -1), (2 * self._size,), self._twice, None, self._epsilon)
        return both[:, : self._size]

    def of_few(self) -> tuple[few_tokens.Floats, float]:
        """Weight and epsilon, of a norm on a CPU in float32."""
        return self.weight.detach().numpy(), self._epsilon


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
        hidden = self._embedding(token_ids)
        self._kept = self._decoder.run_layers(hidden, positions, attention, self._inner_layers)
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

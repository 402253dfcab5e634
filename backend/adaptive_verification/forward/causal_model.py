"""Any transformers causal language model, run over packed tokens of many sequences with a slot cache.

Llama-like models run with joined projections (`fused_forward`), all others as they are (`transformers_forward`); both
hand queries, keys and values to the batch, which writes the cache and attends per sequence. What would be computed
wrongly (sliding windows shorter than the context, attention biases, recurrent layers, ...) is refused at load: by its
configuration where that says so, by the arguments its layers pass, and by comparing a small packed forward with the
model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.fused_forward import FusedForward
from adaptive_verification.forward.linear import use_fastest_linear
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch, zeros
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.transformers_forward import TransformersForward, attention_dimensions

_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded and how large its cache is."""

    dtype: torch.dtype
    device: torch.device
    num_slots: int
    max_context_tokens: int


class CausalModel:
    """A causal language model with its slot cache."""

    def __init__(self, model: PreTrainedModel, options: ModelOptions, hidden_layers: Sequence[int] = ()) -> None:
        """Takes a model that is in place (device, type, eval mode).

        Args:
            hidden_layers: whose outputs are kept beside keys and values, see `forward.hidden_states`.

        Raises:
            UnsupportedModel: packed attention would not compute what the model computes by itself.
        """
        config = model.config.get_text_config()
        refuse_unsupported(config, model, options.max_context_tokens)
        self.vocab_size = int(config.vocab_size)
        self.device = options.device
        self.num_slots = options.num_slots
        self.capacity = options.max_context_tokens
        reference = _probe_reference(model)
        kind = FusedForward if FusedForward.can_fuse(model) else TransformersForward
        self._forward: FusedForward | TransformersForward = kind(model, hidden_layers)
        token = torch.zeros(1, dtype=torch.int64, device=options.device)
        key_dim, value_dim, kv_heads = attention_dimensions(
            lambda attention: self._forward(token, token, attention, token)
        )

        def new_cache(num_slots: int, capacity: int) -> KVCache:
            return KVCache(
                num_layers=config.num_hidden_layers,
                num_slots=num_slots,
                num_kv_heads=kv_heads,
                capacity=capacity,
                key_dim=key_dim,
                value_dim=value_dim,
                dtype=options.dtype,
                device=options.device,
            )

        use_fastest_linear(self._forward.module)
        _check_probe(self._forward, model, reference, new_cache(len(_PROBE_LENGTHS), max(_PROBE_LENGTHS)))
        self.cache = new_cache(options.num_slots, options.max_context_tokens)
        self.hidden_layers = tuple(hidden_layers)
        shape = (options.num_slots, options.max_context_tokens, config.hidden_size * len(hidden_layers))
        self._states = zeros(shape, options.dtype, options.device) if hidden_layers else None

    @classmethod
    def load(
        cls, path: str, options: ModelOptions, num_layers: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> CausalModel:
        """Loads from a directory or hub name, optionally only the first `num_layers` layers with the model's own head.

        Raises:
            UnsupportedModel: see `__init__`.
        """
        config = AutoConfig.from_pretrained(path)
        if num_layers is not None:
            _keep_first_layers(config, num_layers)
            transformers.logging.set_verbosity_error()  # the other layers' weights are unused on purpose
        model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=options.dtype)
        return cls(model.to(options.device).eval(), options, hidden_layers)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor:
        """One forward over the packed tokens of all rows; their keys and values enter the cache.

        Args:
            token_ids: `[T]`, the rows' new tokens end to end.
            logits_at: `[m]` packed places whose next-token logits are wanted; None: the last token of every row.

        Returns:
            `[m, vocab]` logits in the model's type.
        """
        batch = RaggedBatch(rows, self.cache)
        logits = _packed_forward(self._forward, batch, token_ids, logits_at)
        if self._states is not None:
            self._states[batch.slot_of_token, batch.positions] = self._forward.hidden_states()
        return logits

    def hidden_states(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Of `hidden_layers`, of which there must be some, side by side: `[m, width]`.

        Args:
            slots, positions: `[m]`; a forward has computed them.
        """
        assert self._states is not None
        return self._states[slots.to(self.device), positions.to(self.device)]

    def copy_prefix(self, from_slot: int, to_slot: int, start: int, end: int) -> None:
        """All that is kept of positions `start` to `end` of one slot, into another."""
        self.cache.copy_prefix(from_slot, to_slot, start, end)
        if self._states is not None:
            self._states[to_slot, start:end] = self._states[from_slot, start:end]


def _packed_forward(
    forward: FusedForward | TransformersForward, batch: RaggedBatch, token_ids: Tensor, logits_at: Tensor | None
) -> Tensor:
    tokens = token_ids.to(batch.positions.device, torch.int64)
    return forward(tokens, batch.positions, batch, batch.last_token if logits_at is None else logits_at)


def refuse_unsupported(config: PretrainedConfig, model: PreTrainedModel, max_context_tokens: int) -> None:
    """Refuses what the configuration already gives away.

    Raises:
        UnsupportedModel: naming the property.
    """
    name = type(model).__name__
    if config.is_encoder_decoder or not model._supports_attention_backend:
        raise UnsupportedModel(f"{name} does not run through transformers' attention interface")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_context_tokens > longest:
        raise UnsupportedModel(f"{name} has {longest} positions; max_context_tokens={max_context_tokens} is too large")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(
            f"{name} has layers of kind {', '.join(sorted(kinds))}; only full attention is supported"
        )
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    uses_window = "sliding_attention" in layer_types if layer_types else window is not None
    if uses_window and window is not None and window < max_context_tokens:
        raise UnsupportedModel(
            f"{name} attends over a sliding window of {window} tokens; set max_context_tokens to at most {window}, "
            "or use a model with full attention"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in _BATCH_DEPENDENT_ROPE:
        raise UnsupportedModel(f"{name} has {rope_type} rotary embeddings, whose values depend on the whole batch")


def _keep_first_layers(config: PretrainedConfig, num_layers: int) -> None:
    text_config = config.get_text_config()
    if not 1 <= num_layers <= text_config.num_hidden_layers:
        raise UnsupportedModel(
            f"first-layers:{num_layers} is out of range; the target has {text_config.num_hidden_layers} layers"
        )
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:num_layers]


_PROBE_LENGTHS = (5, 8)
_PROBE_TOLERANCE = 1e-3
"""Root mean square difference of the logits, relative to their spread."""
_PROBE_TOLERANCE_HALF_PRECISION = 0.3
"""Thirty layers of bfloat16 move the default target's logits by 0.1 of their spread (transformers against float32; the
fused forward by 0.04), and single logits by three times as much, so that no single one says anything."""


def _probe_tokens(model: PreTrainedModel) -> list[Tensor]:
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator).to(model.device) for length in _PROBE_LENGTHS]


def _probe_reference(model: PreTrainedModel) -> list[Tensor]:
    """The model's own logits `[length, vocab]` of the probe sequences, one by one."""
    with torch.inference_mode():
        return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in _probe_tokens(model)]


def _check_probe(
    forward: FusedForward | TransformersForward, model: PreTrainedModel, reference: list[Tensor], cache: KVCache
) -> None:
    """Runs the probe sequences packed, in two parts each, and compares."""
    sequences = _probe_tokens(model)
    parts: list[list[Tensor]] = [[], []]
    context = [0, 0]
    with torch.inference_mode():
        for chunk in (3, max(_PROBE_LENGTHS)):
            tokens = [sequence[start : start + chunk] for sequence, start in zip(sequences, context, strict=True)]
            rows = [Row(slot, context[slot], len(tokens[slot])) for slot in range(2)]
            packed = torch.cat(tokens)
            everywhere = torch.arange(len(packed), device=packed.device)
            logits = _packed_forward(forward, RaggedBatch(rows, cache), packed, everywhere)
            for slot, row_logits in enumerate(logits.split([row.query_length for row in rows])):
                parts[slot].append(row_logits)
                context[slot] += len(row_logits)
    for expected, got in zip(reference, parts, strict=True):
        difference = (torch.cat(got).float() - expected.float()).square().mean().sqrt().item()
        spread = expected.float().std().item()
        tolerance = _PROBE_TOLERANCE if expected.dtype == torch.float32 else _PROBE_TOLERANCE_HALF_PRECISION
        if not difference <= tolerance * max(spread, 1e-6):
            raise UnsupportedModel(
                f"{type(model).__name__}: packed attention differs from the model's own by {difference:.3g} "
                f"(logits spread over {spread:.3g}); it has a kind of attention that is not supported"
            )

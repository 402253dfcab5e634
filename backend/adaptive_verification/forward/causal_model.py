"""Any transformers causal language model, run over packed tokens of many sequences with a slot cache.

The model is used unmodified, through transformers' public attention interface: its layers call the function registered
here, which writes keys and values to the cache and attends per sequence. What it would compute wrongly (sliding windows
shorter than the context, attention biases, recurrent layers, ...) is refused at load: by its configuration where that
says so, by the arguments its layers pass, and by comparing a small packed forward with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from adaptive_verification.errors import UnsupportedModel
from adaptive_verification.forward.hidden_states import HiddenStates
from adaptive_verification.forward.linear import use_fastest_linear
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch, Row

ATTENTION_NAME = "adaptive_verification_ragged"
_REFUSED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def _ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    ragged: RaggedBatch,
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
    return ragged.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]


transformers.AttentionInterface.register(ATTENTION_NAME, _ragged_attention)


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
            hidden_layers: whose outputs `hidden_states` gives after a forward, see `forward.hidden_states`.

        Raises:
            UnsupportedModel: packed attention would not compute what the model computes by itself.
        """
        config = model.config.get_text_config()
        refuse_unsupported(config, model, options.max_context_tokens)
        self._model = model
        self.vocab_size = int(config.vocab_size)
        self.device = options.device
        self.num_slots = options.num_slots
        self.capacity = options.max_context_tokens
        reference = _probe_reference(model)
        model.set_attn_implementation(ATTENTION_NAME)
        key_dim, value_dim, kv_heads = attention_dimensions(lambda attention: _run_token(model, attention))

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

        use_fastest_linear(model)
        _check_probe(model, reference, new_cache(len(_PROBE_LENGTHS), max(_PROBE_LENGTHS)))
        self.cache = new_cache(options.num_slots, options.max_context_tokens)
        self.hidden_layers = tuple(hidden_layers)
        self._hidden_states = HiddenStates(model, hidden_layers)

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
        return _packed_forward(self._model, self.cache, token_ids, rows, logits_at)

    def hidden_states(self) -> Tensor:
        """The last forward's hidden states `[T, width]` of `hidden_layers`, of which there must be some, side by
        side."""
        return self._hidden_states.take()


def _packed_forward(
    model: PreTrainedModel, cache: KVCache, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None
) -> Tensor:
    batch = RaggedBatch(rows, cache)
    output = model(
        input_ids=token_ids[None].to(batch.positions.device, torch.long),
        position_ids=batch.positions[None],
        use_cache=False,
        logits_to_keep=batch.last_token if logits_at is None else logits_at,
        ragged=batch,
    )
    return output.logits[0]


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


def _run_token(model: PreTrainedModel, attention: object) -> None:
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, ragged=attention)


def attention_dimensions(run: Callable[[object], None]) -> tuple[int, int, int]:
    """(key dim, value dim, kv heads), seen rather than guessed: from what the layers hand to attention.

    Args:
        run: a forward of one token with the given object as `ragged`.

    Raises:
        UnsupportedModel: the layers differ, or do not come here.
    """
    seen: set[tuple[int, int, int]] = set()

    class _Spy:
        capacity = 0

        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            seen.add((key.shape[-1], value.shape[-1], key.shape[1]))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    run(_Spy())
    if len(seen) != 1:
        raise UnsupportedModel(f"the model does not have one attention shape in all layers: {sorted(seen)}")
    return seen.pop()


_PROBE_LENGTHS = (5, 8)


def _probe_tokens(model: PreTrainedModel) -> list[Tensor]:
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator).to(model.device) for length in _PROBE_LENGTHS]


def _probe_reference(model: PreTrainedModel) -> list[Tensor]:
    """The model's own logits `[length, vocab]` of the probe sequences, one by one."""
    with torch.inference_mode():
        return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in _probe_tokens(model)]


def _check_probe(model: PreTrainedModel, reference: list[Tensor], cache: KVCache) -> None:
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
            logits = _packed_forward(model, cache, packed, rows, everywhere)
            for slot, row_logits in enumerate(logits.split([row.query_length for row in rows])):
                parts[slot].append(row_logits)
                context[slot] += len(row_logits)
    for expected, got in zip(reference, parts, strict=True):
        difference = (torch.cat(got).float() - expected.float()).abs().max().item()
        spread = expected.float().std().item()
        tolerance = (1e-3 if expected.dtype == torch.float32 else 0.15) * max(spread, 1e-6)
        if not difference <= tolerance:
            raise UnsupportedModel(
                f"{type(model).__name__}: packed attention differs from the model's own by {difference:.3g} "
                f"(logits spread over {spread:.3g}); it has a kind of attention that is not supported"
            )

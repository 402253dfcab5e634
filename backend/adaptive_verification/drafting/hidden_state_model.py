"""A hidden-state drafter as the drafter stage runs it: packed rows of many sequences, a KV cache, and a state cache.

To the stage it is one more model with a slot cache, whose tokens are the draft vocabulary's and which can only compute
positions whose preceding hidden state it has been sent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaptive_verification.drafting.hidden_state_network import HiddenStateNetwork
from adaptive_verification.forward.causal_model import ModelOptions
from adaptive_verification.forward.fused_forward import FusedDecoder, can_fuse_decoder
from adaptive_verification.forward.linear import use_fastest_linear
from adaptive_verification.forward.ragged_attention import KVCache, RaggedBatch, zeros
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.transformers_forward import Attention, TransformersDecoder, attention_dimensions


class HiddenStateModel:
    """See the module.

    Attributes:
        states_width: numbers of one token's hidden states as the target sends them.
        vocab_size: of the target; every token of a sequence is below it.
        token_ids: `[draft vocabulary]`, what a place in the logits means.
    """

    def __init__(self, network: HiddenStateNetwork, options: ModelOptions) -> None:
        """Takes a network that is in place (device, type, eval mode)."""
        self._network = network
        kind = FusedDecoder if can_fuse_decoder(network.layers) else TransformersDecoder
        self._decoder: FusedDecoder | TransformersDecoder = kind(network.layers)
        draft_vocabulary, hidden_size = network.head.shape
        self._head = nn.Linear(hidden_size, draft_vocabulary, bias=False, device="meta")
        self._head.weight = nn.Parameter(network.head, requires_grad=False)
        linear_parts = [network.from_token, network.from_target, network.from_own, network.combine, self._head]
        use_fastest_linear(nn.ModuleList([*linear_parts, self._decoder]))
        self.device = options.device
        self.dtype = options.dtype
        self.num_slots = options.num_slots
        self.capacity = options.max_context_tokens
        self.token_ids = network.token_ids
        self.vocab_size = len(network.embedding)
        self.states_width = hidden_size * len(network.shape.hidden_layers)
        key_dim, value_dim, kv_heads = attention_dimensions(self._run_once)
        self._cache = KVCache(
            num_layers=network.shape.num_layers,
            num_slots=options.num_slots,
            num_kv_heads=kv_heads,
            capacity=options.max_context_tokens,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=options.dtype,
            device=options.device,
        )
        # place t holds what is known before token t: of the target's state once that was sent, else of the last draft's
        self._contexts = zeros((options.num_slots, self.capacity + 1, hidden_size), options.dtype, options.device)

    def _run_once(self, attention: Attention) -> None:
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._hidden(token, self._network.embedding[:1], token, attention)

    def _hidden(self, token_ids: Tensor, contexts: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Of the network, over packed tokens: `[T]`, `[T, hidden]`, `[T]` -> `[T, hidden]`."""
        guess, inputs = self._network.guess(token_ids, contexts)
        return self._network.refined(guess, self._decoder(inputs, positions, attention))

    @torch.inference_mode()
    def write_states(self, slots: Tensor, positions: Tensor, states: Tensor) -> None:
        """Keeps the target's hidden states `[T, states_width]` of the given positions `[T]` in slots `[T]`."""
        context = self._network.context_of_target(states.to(self.device, self.dtype))
        self._contexts[slots.to(self.device), positions.to(self.device) + 1] = context

    def copy_prefix(self, from_slot: int, to_slot: int, start: int, end: int) -> None:
        """Keys and values of positions `start` to `end` of one slot, into another. States are sent anew with each
        sequence."""
        self._cache.copy_prefix(from_slot, to_slot, start, end)

    def clear_states(self, slot: int, start: int, end: int) -> None:
        """Forgets the states of positions `start` to `end`: none were sent, and what is there is another sequence's."""
        self._contexts[slot, start + 1 : end + 1] = 0

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, rows: list[Row], logits_at: Tensor | None) -> Tensor:
        """As `CausalModel.forward`, over the draft vocabulary; states at `logits_at` are kept for the draft there."""
        batch = RaggedBatch(rows, self._cache)
        places = batch.last_token if logits_at is None else logits_at
        contexts = self._contexts[batch.slot_of_token, batch.positions]
        tokens = token_ids.to(self.device, torch.int64)
        hidden = self._hidden(tokens, contexts, batch.positions, batch)[places]
        self._contexts[batch.slot_of_token[places], batch.positions[places] + 1] = self._network.context_of_own(hidden)
        logits: Tensor = self._head(hidden)
        return logits

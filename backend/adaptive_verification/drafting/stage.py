"""The drafter: proposes up to `MODEL_DRAFT_LIMIT` tokens for each row with a causal language model of its own.

It owns the model and its cache. Where a row asks for no drafts it only notes the tokens: the keys and values are
computed when drafts are wanted again, at most `max_catch_up_tokens` a step, so a row without speculation costs
nothing here and a long prompt does not hold up the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_verification.contract import COUPLED, Draft, DraftCost, StepRequest
from adaptive_verification.contract.message import lists_of_rows
from adaptive_verification.drafting.handed_on_states import HandedOnStates
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.drafting.proposal import Keys, Proposal, by_row, propose
from adaptive_verification.drafting.proposal_loop import MOST_CANDIDATES, propose_by_loop
from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.sequence_table import CachedSequence, Placement, SequenceTable
from adaptive_verification.forward.step_rows import place_rows


@dataclass(frozen=True)
class _CatchUp:
    """A row that wants drafts: the confirmed tokens it computes now, and how many drafts then follow."""

    index: int
    sequence: CachedSequence
    tokens: list[int]
    limit: int
    """0 where the row is not caught up after this step."""


class CausalDrafter:
    """Drafts autoregressively with any causal language model that shares the target's tokenizer, or with a network that
    continues from the target's hidden states."""

    def __init__(
        self,
        model: CausalModel | HiddenStateModel,
        *,
        target_vocab_size: int,
        idle_seconds: float,
        draft_top_k: int,
        max_catch_up_tokens: int,
        with_features: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        """`target_vocab_size`: ids from there on, which padding of the drafter's embedding may add, are never
        drafted. `with_features`: the drafts carry `estimation.features.DRAFT_FEATURES`."""
        self._model = model
        self._states = HandedOnStates(model) if isinstance(model, HiddenStateModel) else None
        if isinstance(model, HiddenStateModel):
            self._token_ids = model.token_ids
        else:
            self._token_ids = torch.arange(min(target_vocab_size, model.vocab_size), device=model.device)
        self._draft_top_k = min(draft_top_k, len(self._token_ids))
        self._max_catch_up_tokens = max_catch_up_tokens
        self._with_features = with_features
        self._table = SequenceTable(
            model.num_slots, model.capacity, idle_seconds, model.copy_prefix if prefix_caching else None
        )

    @torch.inference_mode()
    def step(self, request: StepRequest) -> Draft:
        """Proposes drafts for every row that asks for them and whose context is computed."""
        started = time.perf_counter()
        placements = place_rows(self._table, request, self._model.vocab_size)
        if self._states is not None:
            self._states.take(request, placements)
        rows = self._plan(request, placements)
        drafting = [row for row in rows if row.limit > 0]
        proposals: list[Proposal] = []
        prefilled = started
        if rows:
            if self._states is not None:
                self._states.write([row.sequence for row in rows])
            logits = self._prefill(rows, len(drafting))
            if drafting:
                sampler = _Sampler(request, drafting, self._draft_top_k, self._token_ids, self._with_features)
                proposals.append(sampler.propose(logits, depth=0))
                prefilled = time.perf_counter()
                proposals += self._extend(drafting, sampler, proposals[0])
        cost = DraftCost(
            prefill_ms=(prefilled - started) * 1e3,
            prefill_tokens=float(sum(len(row.tokens) for row in rows)),
            extend_ms=(time.perf_counter() - prefilled) * 1e3,
            drafting_rows=float(len(drafting)),
            depth=float(len(proposals)),
        )
        statuses = torch.tensor([placement.status for placement in placements], dtype=torch.int32)
        return self._assemble(statuses, drafting, proposals, cost)

    def _plan(self, request: StepRequest, placements: list[Placement]) -> list[_CatchUp]:
        """The rows to compute, deepest first: at each depth those that still draft are then the first ones."""
        budget = self._max_catch_up_tokens
        rows = []
        limits = request.draft_limit.tolist(), request.model_draft_limit.tolist()
        for index, (placement, *both) in enumerate(zip(placements, *limits, strict=True)):
            limit = min(both)
            sequence = placement.sequence
            if sequence is None or limit <= 0:
                continue
            limit = min(limit, self._model.capacity - sequence.confirmed_length)
            if limit <= 0 or (self._states is not None and sequence.states_length < sequence.confirmed_length - 1):
                continue
            # the last token's logits are wanted, so it is computed, cached or not
            sequence.computed_length = min(sequence.computed_length, sequence.confirmed_length - 1)
            missing = sequence.missing_tokens()
            budget_left = max(budget, 1)  # a row that lacks one token always drafts
            chunk = missing[:budget_left]
            budget -= len(chunk)
            rows.append(_CatchUp(index, sequence, chunk, limit if len(chunk) == len(missing) else 0))
        return sorted(rows, key=lambda row: -row.limit)

    def _prefill(self, rows: list[_CatchUp], num_drafting: int) -> Tensor:
        """Computes the rows' missing tokens; returns the logits `[num_drafting, vocab]` after them."""
        batch = [Row(row.sequence.slot, row.sequence.computed_length, len(row.tokens)) for row in rows]
        token_ids = torch.tensor([token for row in rows for token in row.tokens])
        last_place = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
        logits = self._model.forward(token_ids, batch, last_place[:num_drafting].to(self._model.device))
        for row in rows:
            row.sequence.mark_computed(row.sequence.computed_length + len(row.tokens), [])
        return logits

    def _extend(self, drafting: list[_CatchUp], sampler: _Sampler, proposal: Proposal) -> list[Proposal]:
        """The drafts after the first, one forward for each depth over the rows that go so deep."""
        proposals = []
        for depth in range(1, drafting[0].limit):
            active = [row for row in drafting if row.limit > depth]
            batch = [Row(row.sequence.slot, row.sequence.confirmed_length + depth - 1, 1) for row in active]
            logits = self._model.forward(proposal.tokens[: len(active)], batch, None)
            proposal = sampler.propose(logits, depth)
            proposals.append(proposal)
        return proposals

    def _assemble(
        self, statuses: Tensor, drafting: list[_CatchUp], proposals: list[Proposal], cost: DraftCost
    ) -> Draft:
        """The proposals, one for each depth over ever fewer rows, as flat tensors in the request's row order."""
        counts = [0] * len(statuses)
        for row in drafting:
            counts[row.index] = row.limit
        drafted_count = torch.tensor(counts, dtype=torch.int32)
        if not proposals:
            nothing = torch.empty(0, dtype=torch.int32)
            return Draft(
                drafted_count=drafted_count,
                draft_status=statuses,
                draft_match_length=torch.zeros_like(drafted_count),
                draft_tokens=nothing,
                draft_log_odds=torch.empty(0),
                draft_features=torch.empty(0),
                candidate_count=nothing,
                candidate_ids=nothing,
                candidate_probs=torch.empty(0),
                draft_cost=cost.to_tensor(),
            )
        drafts = by_row(proposals, [row.index for row in drafting])
        tokens = drafts.tokens.to("cpu", torch.int32)
        tokens_of_rows = lists_of_rows(tokens, drafted_count)
        for row in drafting:
            # drafts that followed from the drafter's own states are computed again, from the target's
            computed_drafts = tokens_of_rows[row.index][:-1] if self._states is None else []
            row.sequence.mark_computed(row.sequence.confirmed_length, computed_drafts)
        is_candidate = drafts.q.probs > 0  # [drafts, C]
        return Draft(
            drafted_count=drafted_count,
            draft_status=statuses,
            draft_match_length=torch.zeros_like(drafted_count),
            draft_tokens=tokens,
            draft_log_odds=drafts.log_odds.to(torch.float32),
            draft_features=torch.empty(0) if drafts.features is None else drafts.features.to(torch.float32).flatten(),
            candidate_count=is_candidate.sum(-1).to("cpu", torch.int32),
            candidate_ids=drafts.q.ids[is_candidate].to(torch.int32),
            candidate_probs=drafts.q.probs[is_candidate].to(torch.float32),
            draft_cost=cost.to_tensor(),
        )


class _Sampler:
    """The drafting rows' sampling settings, on the model's device."""

    def __init__(
        self,
        request: StepRequest,
        drafting: list[_CatchUp],
        draft_top_k: int,
        token_ids: Tensor,
        with_features: bool,
    ) -> None:
        """`token_ids`: `[vocab]`, which token each logit is of, on the model's device."""
        device = token_ids.device
        index = torch.tensor([row.index for row in drafting])
        self._temperature = request.temperature[index].to(device)
        self._top_k = request.top_k[index].to(device)
        self._top_p = request.top_p[index].to(device)
        self._seed = request.seed[index].to(device)
        coupled = request.acceptance[index] == COUPLED
        self._coupled = coupled.to(device)
        self._block = torch.tensor([row.sequence.confirmed_length for row in drafting], device=device)
        self._draft_top_k = draft_top_k
        self._token_ids = token_ids
        self._with_features = with_features
        self._has_loop = (
            device.type == "cpu" and draft_top_k <= MOST_CANDIDATES and not with_features and not bool(coupled.any())
        )

    def propose(self, logits: Tensor, depth: int) -> Proposal:
        """One draft of each of the first rows, as many as there are logits; padding of the vocabulary is left out."""
        logits = logits[:, : len(self._token_ids)]
        rows = slice(len(logits))
        settings = (self._temperature[rows], self._top_k[rows], self._top_p[rows])
        keys = Keys(self._seed[rows], self._block[rows], depth, self._coupled[rows])
        if self._has_loop:
            return propose_by_loop(logits, *settings, self._draft_top_k, keys, self._token_ids)
        return propose(logits, *settings, self._draft_top_k, keys, self._token_ids, self._with_features)

"""The verifier: one ragged forward of the target over all rows' missing tokens and admitted drafts, then acceptance.

It owns the target model and its cache. It knows nothing of how drafts were made or chosen: it sees tokens, the
distributions they were drawn from, and how many of them are admitted.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from adaptive_verification.contract import (
    NOT_FOLLOWED,
    Draft,
    DraftCost,
    Estimate,
    StepCost,
    StepRequest,
    StepResult,
)
from adaptive_verification.contract.message import lists_of_rows
from adaptive_verification.contract.messages import refuse_unknown_tokens
from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.row import Row
from adaptive_verification.forward.sequence_table import CachedSequence, Placement, SequenceTable
from adaptive_verification.forward.step_rows import place_rows
from adaptive_verification.verification.acceptance import Accepted, accept
from adaptive_verification.verification.block import Block
from adaptive_verification.verification.hidden_states import FollowedRow, HandedOn, handed_on


class VerifierStage:
    """See the module. One instance owns one model and one cache."""

    def __init__(self, model: CausalModel, idle_seconds: float, prefix_caching: bool = True) -> None:
        self._model = model
        self._table = SequenceTable(
            model.num_slots, model.capacity, idle_seconds, model.copy_prefix if prefix_caching else None
        )

    @torch.inference_mode()
    def step(self, request: StepRequest, draft: Draft, estimate: Estimate) -> StepResult:
        """Verifies one step. A row that the drafter could not place gets the drafter's status, and no output.

        Raises:
            ContractError: a draft is no token of the target's.
        """
        started = time.perf_counter()
        refuse_unknown_tokens("DRAFT_TOKENS", draft.draft_tokens, self._model.vocab_size)
        placements = place_rows(self._table, request, self._model.vocab_size, draft.draft_status.tolist())
        admitted = self._admitted_counts(draft, estimate, placements)
        samples = request.samples.tolist()
        live = [(i, placement.sequence) for i, placement in enumerate(placements) if placement.sequence is not None]
        for i, sequence in live:
            if samples[i]:  # its last token's logits are wanted, so that token is computed, cached or not
                sequence.computed_length = min(sequence.computed_length, sequence.confirmed_length - 1)

        drafts_of_rows = lists_of_rows(draft.draft_tokens, draft.drafted_count)
        admitted_drafts = {i: drafts_of_rows[i][: admitted[i]] for i, _ in live}
        rows, token_ids, logit_places = _pack(live, samples, admitted_drafts)
        output_count = torch.zeros(request.num_rows, dtype=torch.int32)
        output_tokens, log_probs = torch.empty(0, dtype=torch.int32), torch.empty(0)
        if rows:
            logits = self._model.forward(
                torch.tensor(token_ids), rows, torch.tensor(logit_places, dtype=torch.int64, device=self._model.device)
            )
            for i, sequence in live:
                sequence.mark_computed(sequence.confirmed_length, admitted_drafts[i])
            sampling = torch.tensor([i for i, _ in live if samples[i]], dtype=torch.int64)
            if len(sampling):
                outcome = self._accept(logits, request, draft, admitted, sampling)
                output_count[sampling] = outcome.accepted.to("cpu", torch.int32) + 1
                output_tokens = outcome.output_tokens.to("cpu", torch.int32)
                log_probs = outcome.log_probs.cpu()
        hidden = self._handed_on(request, estimate, live, output_count)
        cost = StepCost(
            draft=DraftCost.from_tensor(draft.draft_cost) or DraftCost.nothing(),
            estimate_ms=float(estimate.estimate_cost[0]) if estimate.estimate_cost.numel() else 0.0,
            verify_ms=(time.perf_counter() - started) * 1e3,
            verify_rows=float(len(rows)),
            verify_tokens=float(len(token_ids)),
            reused_tokens=float(sum(placement.reused_tokens for placement in placements)),
        )
        return StepResult(
            output_count=output_count,
            status=torch.tensor([placement.status for placement in placements], dtype=torch.int32),
            drafted_count=draft.drafted_count,
            admitted_count=torch.tensor(admitted, dtype=torch.int32),
            next_draft_limit=estimate.next_draft_limit,
            output_tokens=output_tokens,
            log_probs=log_probs,
            hidden_start=hidden.hidden_start,
            hidden_count=hidden.hidden_count,
            hidden_states=hidden.hidden_states,
            step_cost=cost.to_tensor(),
        )

    def _handed_on(
        self,
        request: StepRequest,
        estimate: Estimate,
        live: list[tuple[int, CachedSequence]],
        output_count: Tensor,
    ) -> HandedOn:
        followed: list[FollowedRow] = []
        if self._model.hidden_layers:
            is_followed = ((request.draft_limit != 0) & (estimate.next_draft_limit != NOT_FOLLOWED)).tolist()
            num_accepted = (output_count - 1).clamp(min=0).tolist()
            followed = [
                FollowedRow(i, sequence, sequence.confirmed_length + num_accepted[i])
                for i, sequence in live
                if is_followed[i]
            ]
        return handed_on(self._model, followed, request.num_rows)

    def _admitted_counts(self, draft: Draft, estimate: Estimate, placements: list[Placement]) -> list[int]:
        """The estimator's counts, cut to what was drafted and to the room left in the cache."""
        return [
            max(0, min(admitted, drafted, self._model.capacity - placement.sequence.confirmed_length))
            if placement.sequence is not None
            else 0
            for admitted, drafted, placement in zip(
                estimate.admitted_count.tolist(), draft.drafted_count.tolist(), placements, strict=True
            )
        ]

    def _accept(
        self, logits: Tensor, request: StepRequest, draft: Draft, admitted: list[int], sampling: Tensor
    ) -> Accepted:
        device = self._model.device
        return accept(
            logits,
            Block(
                sampling=sampling,
                admitted=torch.tensor(admitted),
                drafted_count=draft.drafted_count,
                candidate_count=draft.candidate_count,
                draft_tokens=draft.draft_tokens.to(device),
                candidate_ids=draft.candidate_ids.to(device),
                candidate_probs=draft.candidate_probs.to(device),
                temperature=request.temperature.to(device),
                top_k=request.top_k.to(device),
                top_p=request.top_p.to(device),
                seed=request.seed.to(device),
                acceptance=request.acceptance.to(device),
                block=(request.context_length + request.token_count).to(device),
                wants_log_probs=request.wants_log_probs.to(device),
            ),
        )


def _pack(
    live: list[tuple[int, CachedSequence]], samples: list[bool], drafts: dict[int, list[int]]
) -> tuple[list[Row], list[int], list[int]]:
    """The forward's rows, its tokens, and the places whose logits acceptance needs.

    The last are, for each sampling row, its last confirmed token and its drafts.
    """
    rows: list[Row] = []
    token_ids: list[int] = []
    logit_places: list[int] = []
    for i, sequence in live:
        new_tokens = sequence.missing_tokens() + drafts[i]
        if not new_tokens:
            continue
        rows.append(Row(sequence.slot, sequence.computed_length, len(new_tokens)))
        token_ids += new_tokens
        if samples[i]:
            logit_places += range(len(token_ids) - len(drafts[i]) - 1, len(token_ids))
    return rows, token_ids, logit_places

"""The drafter that looks drafts up in the sequences themselves, and asks a model only where there is nothing to find.

It owns the sequences' indices; the model and its cache belong to the stage it wraps, if there is one. What a looked-up
draft is worth, the estimator learns from earlier ones of the same match length.

A looked-up draft is a function of the confirmed tokens: its q is one candidate of probability 1, as of greedy drafts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from adaptive_verification.contract import STATUS_OK, Draft, DraftCost, StepRequest
from adaptive_verification.contract.message import lists_of_rows
from adaptive_verification.contract.step import Drafter
from adaptive_verification.drafting.lookup import LookupIndex
from adaptive_verification.forward.sequence_table import Placement, SequenceTable
from adaptive_verification.forward.step_rows import place_rows

MAX_MATCH = 32
"""A longer match is as good as this one."""
NO_LOG_ODDS = 0.0
"""`DRAFT_LOG_ODDS` of a looked-up draft, and each of its `DRAFT_FEATURES`: it says nothing, and nothing reads it."""


class _Found(NamedTuple):
    """A row's drafts; without any, the match length is 0."""

    match_length: int
    tokens: list[int]


_NOTHING = _Found(0, [])


class LookupDrafter:
    """Drafts what followed the last tokens when they occurred before.

    Args:
        model: drafts in the rows without a match; None: nobody does.
        min_match: tokens of the shortest match that is drafted from.
        num_slots, capacity, idle_seconds: of the sequences remembered, see `SequenceTable`. Where there is a model,
            the same as its own.
        vocab_size: of the target.
        num_features: numbers that `DRAFT_FEATURES` has for each draft; as the model's.
    """

    def __init__(
        self,
        model: Drafter | None,
        *,
        min_match: int,
        num_slots: int,
        capacity: int,
        idle_seconds: float,
        vocab_size: int,
        num_features: int = 0,
    ) -> None:
        self._model = model
        self._min_match = min_match
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._num_features = num_features
        self._table = SequenceTable(num_slots, capacity, idle_seconds)
        self._indices: dict[int, LookupIndex] = {}

    def step(self, request: StepRequest) -> Draft:
        """Proposes drafts for every row that asks for them and has a match, and the model's for the others."""
        placements = place_rows(self._table, request, self._vocab_size)
        self._confirm(request, placements)
        found = self._find(request, placements)
        statuses = [placement.status for placement in placements]
        if self._model is None:
            return self._looked_up(found, statuses)
        limits = [
            limit if status == STATUS_OK and not drafts.tokens else min(limit, 0)
            for limit, status, drafts in zip(request.draft_limit.tolist(), statuses, found, strict=True)
        ]
        by_model = self._model.step(dataclasses.replace(request, draft_limit=_int32(limits)))
        statuses = [
            status if models == STATUS_OK else models
            for status, models in zip(statuses, by_model.draft_status.tolist(), strict=True)
        ]
        found = [drafts if status == STATUS_OK else _NOTHING for drafts, status in zip(found, statuses, strict=True)]
        if not any(drafts.tokens for drafts in found):
            return dataclasses.replace(by_model, draft_status=_int32(statuses))
        return _merged(by_model, self._looked_up(found, statuses))

    def _confirm(self, request: StepRequest, placements: list[Placement]) -> None:
        self._indices = {key: index for key, index in self._indices.items() if key in self._table}
        tokens_of_rows = lists_of_rows(request.tokens, request.token_count)
        for sequence_id, context_length, tokens, placement in zip(
            request.sequence_id.tolist(), request.context_length.tolist(), tokens_of_rows, placements, strict=True
        ):
            if placement.sequence is not None:
                if sequence_id not in self._indices:
                    self._indices[sequence_id] = LookupIndex(self._min_match, MAX_MATCH)
                self._indices[sequence_id].confirm(context_length, tokens)

    def _find(self, request: StepRequest, placements: list[Placement]) -> list[_Found]:
        """What each row's match is followed by, as far as the row wants drafts and the cache has room for them."""
        found = []
        for sequence_id, limit, placement in zip(
            request.sequence_id.tolist(), request.draft_limit.tolist(), placements, strict=True
        ):
            found.append(_NOTHING)
            if placement.sequence is None:
                continue
            limit = min(limit, self._capacity - placement.sequence.confirmed_length)
            index = self._indices[sequence_id]
            match = index.longest_match() if limit > 0 else None
            if match is not None:
                found[-1] = _Found(match.length, index.continuation(match, limit))
        return found

    def _looked_up(self, found: list[_Found], statuses: list[int]) -> Draft:
        draft_tokens = _int32([token for drafts in found for token in drafts.tokens])
        return Draft(
            drafted_count=_int32([len(drafts.tokens) for drafts in found]),
            draft_status=_int32(statuses),
            draft_match_length=_int32([drafts.match_length for drafts in found]),
            draft_tokens=draft_tokens,
            draft_log_odds=torch.full(draft_tokens.shape, NO_LOG_ODDS),
            draft_features=torch.full((self._num_features * len(draft_tokens),), NO_LOG_ODDS),
            candidate_count=torch.ones_like(draft_tokens),
            candidate_ids=draft_tokens,
            candidate_probs=torch.ones(draft_tokens.shape),
            draft_cost=DraftCost.nothing().to_tensor(),
        )


def _merged(by_model: Draft, looked_up: Draft) -> Draft:
    """The rows of both, of which at most one has drafts in each row; the statuses are the second's."""
    rows = torch.arange(looked_up.num_rows)
    draft_rows = [rows.repeat_interleave(part.drafted_count) for part in (by_model, looked_up)]
    in_row_order = torch.cat(draft_rows).argsort(stable=True)  # [drafts]
    candidate_rows = [
        row.repeat_interleave(part.candidate_count) for row, part in zip(draft_rows, (by_model, looked_up), strict=True)
    ]
    candidates_in_row_order = torch.cat(candidate_rows).argsort(stable=True)  # [candidates]

    def joined(field: str, order: Tensor) -> Tensor:
        models, ours = getattr(by_model, field), getattr(looked_up, field)
        values = torch.cat([models, ours.to(models.device)])
        width = values.numel() // len(order)  # 1, but for `draft_features`
        return values.view(len(order), width)[order.to(models.device)].flatten()

    return dataclasses.replace(
        looked_up,
        drafted_count=by_model.drafted_count + looked_up.drafted_count,
        draft_tokens=joined("draft_tokens", in_row_order),
        draft_log_odds=joined("draft_log_odds", in_row_order),
        draft_features=joined("draft_features", in_row_order),
        candidate_count=joined("candidate_count", in_row_order),
        candidate_ids=joined("candidate_ids", candidates_in_row_order),
        candidate_probs=joined("candidate_probs", candidates_in_row_order),
        draft_cost=by_model.draft_cost,
    )


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)

"""A made drafter and target around the real estimator stage: what the other stages would send it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adaptive_verification.contract import Draft, Estimate, StepCost, StepRequest
from adaptive_verification.contract.costs import DraftCost
from adaptive_verification.contract.hidden_states import NO_STATES, for_rows
from adaptive_verification.contract.messages import NO_LABEL, REJECTION, STATUS_OK
from adaptive_verification.estimation.cost_model import DRAFT_EXTEND, DRAFT_PREFILL, VERIFY, CostCurve
from adaptive_verification.estimation.stage import EstimatorStage

KEY = 2**63 + 5
CURVES = {
    VERIFY: CostCurve((1, 8, 64, 512), (19.0, 22.0, 52.0, 277.0)),
    DRAFT_PREFILL: CostCurve((1, 64), (2.0, 5.0)),
    DRAFT_EXTEND: CostCurve((1, 64), (1.0, 3.0)),
}
NOTHING = torch.zeros(0)


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_request(
    sequence_ids: Sequence[int],
    confirmed: Sequence[int],
    *,
    limits: Sequence[int],
    model_limits: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
    token_count: Sequence[int] | None = None,
    key: int | None = KEY,
    cost: StepCost | None = None,
    release: Sequence[int] = (),
) -> StepRequest:
    """Rows with so many confirmed tokens in all, of which the last `token_count` (one) are new.

    `model_limits`: as the limits, where they are not given.
    """
    rows = len(sequence_ids)
    token_count = token_count or [1] * rows
    signed_key = [] if key is None else [key - 2**64 if key >= 2**63 else key]
    return StepRequest(
        sequence_id=torch.tensor(sequence_ids, dtype=torch.int64),
        context_length=int32(confirmed) - int32(token_count),
        token_count=int32(token_count),
        tokens=torch.zeros(sum(token_count), dtype=torch.int32),
        draft_limit=int32(limits),
        model_draft_limit=int32(limits if model_limits is None else model_limits).clamp(min=0),
        temperature=torch.ones(rows),
        top_p=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int32),
        seed=torch.zeros(rows, dtype=torch.int64),
        acceptance=int32([REJECTION] * rows),
        wants_log_probs=int32([0] * rows),
        previous_accepted=int32(accepted if accepted is not None else [NO_LABEL] * rows),
        previous_cost=NOTHING if cost is None else cost.to_tensor(),
        **for_rows([NO_STATES] * rows),
        release=torch.tensor(release, dtype=torch.int64),
        evidence_key=torch.tensor(signed_key, dtype=torch.int64),
    ).validate()


def make_draft(
    log_odds: Sequence[Sequence[float]],
    *,
    status: Sequence[int] | None = None,
    cost: DraftCost | None = None,
    match_length: Sequence[int] | None = None,
    with_features: bool = False,
) -> Draft:
    """Drafts with these log-odds in each row; a model's, unless the row has a match length.

    Their `DRAFT_FEATURES` are the log-odds minus 2, minus 1 and as they are.
    """
    counts = [len(row) for row in log_odds]
    total = sum(counts)
    values = torch.tensor([value for row in log_odds for value in row], dtype=torch.float32)
    features = values.unsqueeze(-1) - torch.tensor([2.0, 1.0, 0.0])
    return Draft(
        drafted_count=int32(counts),
        draft_status=int32(status if status is not None else [STATUS_OK] * len(counts)),
        draft_match_length=int32(match_length if match_length is not None else [0] * len(counts)),
        draft_tokens=torch.zeros(total, dtype=torch.int32),
        draft_log_odds=values,
        draft_features=features.flatten() if with_features else torch.empty(0),
        candidate_count=torch.ones(total, dtype=torch.int32),
        candidate_ids=torch.zeros(total, dtype=torch.int32),
        candidate_probs=torch.ones(total),
        draft_cost=NOTHING if cost is None else cost.to_tensor(),
    ).validate()


@dataclasses.dataclass
class MadeChain:
    """Endless sequences whose drafts are accepted with probability `sigmoid(slope * log_odds + intercept)`.

    A share of the rows, others in each step, is looked up instead, after matches of 4 or 16 tokens, and accepted with
    probability `lookup_acceptance`. The stages cost what `CURVES` say, times `slowness`.
    """

    stage: EstimatorStage
    rows: int
    seed: int = 0
    slope: float = 0.8
    intercept: float = 0.1
    mean_log_odds: float = 1.0
    most_drafts: int = 7
    slowness: float = 1.0
    first_id: int = 0
    lookup_share: float = 0.0
    lookup_acceptance: float = 0.9
    with_features: bool = False

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self._confirmed = [10] * self.rows
        self._accepted = [NO_LABEL] * self.rows
        self._limits = [self.most_drafts] * self.rows
        self._cost: StepCost | None = None

    def step(self, **changes: Any) -> tuple[Estimate, list[int]]:
        """One step; returns the estimate and the drafts that the model made of each row."""
        limits = list(self._limits)
        request = make_request(
            range(self.first_id, self.first_id + self.rows),
            self._confirmed,
            limits=[self.most_drafts] * self.rows,
            model_limits=limits,
            accepted=self._accepted,
            cost=self._cost,
            **changes,
        )
        log_odds = [
            (torch.randn(limit, generator=self._generator) * 2 + self.mean_log_odds).tolist() for limit in limits
        ]
        matches = self._matches()
        for row, match_length in enumerate(matches):
            if match_length:
                limits[row], log_odds[row] = 0, [0.0] * self.most_drafts
        drafting, depth = sum(limit > 0 for limit in limits), max(limits)
        prefill_ms, extend_ms = _draft_ms(drafting, depth)
        draft_cost = DraftCost(prefill_ms * self.slowness, drafting, extend_ms * self.slowness, drafting, depth)
        draft = make_draft(log_odds, cost=draft_cost, match_length=matches, with_features=self.with_features)
        estimate = self.stage.step(request, draft)
        admitted = estimate.admitted_count.tolist()
        self._accepted = []
        for row, values in enumerate(log_odds):
            p = torch.sigmoid(self.slope * torch.tensor(values[: admitted[row]]) + self.intercept)
            if matches[row]:
                p = torch.full((admitted[row],), self.lookup_acceptance)
            kept = (torch.rand(p.shape, generator=self._generator) < p).int().cumprod(0)
            self._accepted.append(int(kept.sum()))
            self._confirmed[row] += self._accepted[-1] + 1
        tokens = self.rows + sum(admitted)
        verify_ms = _at(CURVES[VERIFY], tokens) * self.slowness
        self._cost = StepCost(draft_cost, 1.0, verify_ms, self.rows, tokens)
        self._limits = [min(limit, self.most_drafts) for limit in estimate.next_draft_limit.tolist()]
        return estimate, limits

    def _matches(self) -> list[int]:
        """Each row's match length; 0 where nothing is looked up."""
        if not self.lookup_share:
            return [0] * self.rows
        looked_up = torch.rand(self.rows, generator=self._generator) < self.lookup_share
        lengths = torch.randint(0, 2, (self.rows,), generator=self._generator) * 12 + 4
        return (looked_up * lengths).tolist()


def _at(curve: CostCurve, size: float) -> float:
    return float(np.interp(size, curve.sizes, curve.milliseconds))


def _draft_ms(rows: int, depth: int) -> tuple[float, float]:
    if depth == 0:
        return 0.0, 0.0
    return _at(CURVES[DRAFT_PREFILL], rows), (depth - 1) * _at(CURVES[DRAFT_EXTEND], rows)

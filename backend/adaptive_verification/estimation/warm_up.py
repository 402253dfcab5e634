"""Has everything compiled before the first request, which would wait for it for some seconds on a new machine."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from adaptive_verification.contract.message import ONE_PER_ROW, Message
from adaptive_verification.contract.messages import Draft, StepRequest
from adaptive_verification.estimation.cost_model import DRAFT_EXTEND, DRAFT_PREFILL, VERIFY, CostCurve
from adaptive_verification.estimation.features import DRAFT_FEATURES
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings

M = TypeVar("M", bound=Message)

_KEY = 0
_ROWS = 2


def warm_up(settings: EstimatorSettings) -> None:
    """Runs an estimator like this one, which is thrown away, through a step that leaves nothing out."""
    flat = CostCurve((1, 2), (1.0, 1.0))
    stage = EstimatorStage(
        settings.model_copy(update={"state_directory": "", "exploration_share": 1.0}),
        evidence_key=_KEY,
        curves=dict.fromkeys((VERIFY, DRAFT_PREFILL, DRAFT_EXTEND), flat),
    )
    one = torch.ones(_ROWS, dtype=torch.int32)
    request = dataclasses.replace(
        _blank(StepRequest),
        sequence_id=torch.arange(_ROWS),
        token_count=one,
        draft_limit=one,
        model_draft_limit=one,
        previous_accepted=one,
        evidence_key=torch.tensor([_KEY]),
    )
    draft = dataclasses.replace(
        _blank(Draft),
        drafted_count=one,
        draft_log_odds=torch.zeros(_ROWS),
        draft_features=torch.zeros(_ROWS * len(DRAFT_FEATURES)),
    )
    stage.step(request, draft)


def _blank(message: type[M]) -> M:
    """A message whose rows are all 0, with nothing in them."""
    lengths = {tensor: _ROWS if tensor.length == ONE_PER_ROW else 0 for tensor in message.wire_tensors()}
    return message(
        **{name: torch.zeros(n, dtype=tensor.dtype) for tensor, n in lengths.items() for name in tensor.fields}
    )

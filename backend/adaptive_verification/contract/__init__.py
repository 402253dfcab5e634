"""The tensors of one decode step: see `messages` for what they are, `wire` for how they travel through Triton."""

from adaptive_verification.contract.costs import DraftCost, StepCost
from adaptive_verification.contract.messages import (
    COUPLED,
    DRAFTER,
    ESTIMATOR,
    FILL_ONLY,
    NO_LABEL,
    NOT_FOLLOWED,
    REJECTION,
    STATUS_BAD_TOKEN,
    STATUS_CONTEXT_FULL,
    STATUS_NO_SLOT,
    STATUS_NOT_CACHED,
    STATUS_OK,
    VERIFIER,
    Draft,
    Estimate,
    StepRequest,
    StepResult,
)
from adaptive_verification.contract.step import LocalStep, Step

__all__ = [
    "COUPLED",
    "DRAFTER",
    "ESTIMATOR",
    "FILL_ONLY",
    "NOT_FOLLOWED",
    "NO_LABEL",
    "REJECTION",
    "STATUS_BAD_TOKEN",
    "STATUS_CONTEXT_FULL",
    "STATUS_NOT_CACHED",
    "STATUS_NO_SLOT",
    "STATUS_OK",
    "VERIFIER",
    "Draft",
    "DraftCost",
    "Estimate",
    "LocalStep",
    "Step",
    "StepCost",
    "StepRequest",
    "StepResult",
]

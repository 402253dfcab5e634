"""The four messages of one decode step, each a bundle of flat tensors.

    StepRequest  the caller's, to every stage
    Draft        drafter -> estimator, verifier
    Estimate     estimator -> verifier
    StepResult   verifier -> caller; the whole step's answer

This module owns the fields' names, element types, lengths and allowed values, and which tensor of the wire each is: one
of its own, or a line of one that it shares, in the order of declaration (see `contract.message`). Comments and errors
name a field in capitals in either case. The module knows nothing of Triton (`contract.wire` does) and nothing of what
the stages compute.

Ragged values lie end to end; a count field of the same message, or of the request, says how many belong to each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from adaptive_verification.contract.message import (
    ANY_LENGTH,
    ONE_PER_ROW,
    Message,
    Range,
    WireTensor,
    alone,
    line_of,
    wide,
)
from adaptive_verification.errors import ContractError

STATUS_OK = 0
STATUS_NOT_CACHED = 1
"""The prefix before `CONTEXT_LENGTH` is not cached: resend the sequence from context length 0."""
STATUS_CONTEXT_FULL = 2
"""The row's tokens do not fit the cache's capacity."""
STATUS_NO_SLOT = 3
"""Every cache slot is taken by another row of the same step: fewer rows, or more `cache_slots`."""
STATUS_BAD_TOKEN = 4
"""A token id of the row is not in the target's vocabulary."""

FILL_ONLY = -1
"""`DRAFT_LIMIT` of a row that only fills the caches (a prompt chunk) and samples nothing."""
NOT_FOLLOWED = -1
"""`NEXT_DRAFT_LIMIT` of a row whose hidden states are not handed on, so that a model does not draft for it now."""
NO_LABEL = -1
"""`PREVIOUS_ACCEPTED` of a row whose last step teaches the estimator nothing."""

REJECTION = 0
"""`ACCEPTANCE`: a draft is accepted with probability min(1, p/q)."""
COUPLED = 1
"""`ACCEPTANCE`: a draft is accepted if it is the target's own token; both meet the same noise."""

DRAFTER = "drafter"
ESTIMATOR = "av_estimator"
VERIFIER = "verifier"

_MAX_INT32 = int(np.iinfo(np.int32).max)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_LEAST_FLOAT32 = float(np.nextafter(np.float32(0), np.float32(1)))  # above 0

IDS_AND_SEEDS = WireTensor("IDS_AND_SEEDS", "UINT64", ONE_PER_ROW)
REQUEST_ROWS = WireTensor("REQUEST_ROWS", "INT32", ONE_PER_ROW)
TEMPERATURE_AND_TOP_P = WireTensor("TEMPERATURE_AND_TOP_P", "FP32", ONE_PER_ROW, (DRAFTER, VERIFIER))


@dataclass
class StepRequest(Message):
    """What the caller asks of one step, for n rows.

    A row's confirmed tokens are the first `context_length` tokens of its sequence, sent before, followed by this
    request's `tokens`. The caller's tokens are the truth: a stage reuses what it has cached only where it equals them.
    """

    shared_fields = frozenset({"previous_cost", "evidence_key"})
    ranges: ClassVar[dict[str, Range]] = {
        "context_length": Range(0, _MAX_INT32, "at least 0"),
        "token_count": Range(1, _MAX_INT32, "at least 1"),
        "draft_limit": Range(FILL_ONLY, _MAX_INT32, "at least -1"),
        "model_draft_limit": Range(0, _MAX_INT32, "at least 0"),
        "top_k": Range(0, _MAX_INT32, "at least 0"),
        "acceptance": Range(REJECTION, COUPLED, "0 or 1"),
        "wants_log_probs": Range(0, 1, "0 or 1"),
        "previous_accepted": Range(NO_LABEL, _MAX_INT32, "at least -1"),
        "previous_hidden_start": Range(0, _MAX_INT32, "at least 0"),
        "previous_hidden_count": Range(0, _MAX_INT32, "at least 0"),
        "temperature": Range(0, _MAX_FLOAT32, "finite and at least 0"),
        "top_p": Range(_LEAST_FLOAT32, 1, "above 0 and at most 1"),
        "tokens": Range(0, _MAX_INT32, "a token id of the target"),
    }

    sequence_id: Tensor = line_of(IDS_AND_SEEDS)  # chosen by the caller
    seed: Tensor = line_of(IDS_AND_SEEDS)

    context_length: Tensor = line_of(REQUEST_ROWS)  # confirmed tokens before this request's tokens
    token_count: Tensor = line_of(REQUEST_ROWS)  # at least 1
    draft_limit: Tensor = line_of(REQUEST_ROWS)  # at most so many drafts; 0: sample one token; FILL_ONLY
    model_draft_limit: Tensor = line_of(
        REQUEST_ROWS
    )  # and so many of them from a model, whose depth costs: what the last step advised; looked-up drafts are free
    top_k: Tensor = line_of(REQUEST_ROWS)  # 0: off
    acceptance: Tensor = line_of(REQUEST_ROWS)  # REJECTION or COUPLED
    wants_log_probs: Tensor = line_of(REQUEST_ROWS)  # 1: LOG_PROBS of the row's tokens, which take time
    previous_accepted: Tensor = line_of(REQUEST_ROWS)  # drafts of the last step that the target accepted; NO_LABEL
    previous_hidden_start: Tensor = line_of(REQUEST_ROWS)  # the position of the row's first hidden state
    previous_hidden_count: Tensor = line_of(REQUEST_ROWS)  # 0 where there are none to hand on

    temperature: Tensor = line_of(TEMPERATURE_AND_TOP_P)  # 0: greedy
    top_p: Tensor = line_of(TEMPERATURE_AND_TOP_P)  # in (0, 1]; 1: off

    tokens: Tensor = alone("INT32", "token_count", DRAFTER, VERIFIER)  # newly confirmed tokens
    previous_cost: Tensor = alone("FP32", ANY_LENGTH, ESTIMATOR)  # the last result's STEP_COST, or empty
    previous_hidden_states: Tensor = wide("UINT8", "previous_hidden_count", DRAFTER)  # as the last result gave them
    release: Tensor = alone("UINT64", ANY_LENGTH)  # sequences to forget
    evidence_key: Tensor = alone(
        "UINT64", ANY_LENGTH, ESTIMATOR
    )  # proves that this caller's labels may teach the estimator, or empty

    @property
    def samples(self) -> Tensor:
        """Which rows ask for tokens, rather than only filling the caches. `[rows]` bool."""
        return self.draft_limit != FILL_ONLY

    def check_lengths(self, reader: str | None = None) -> None:
        super().check_lengths(reader)
        if len(set(self.sequence_id.tolist())) != self.num_rows:
            raise ContractError("SEQUENCE_ID names a sequence twice; a sequence can be in one row of a step only")


DRAFT_ROWS = WireTensor("DRAFT_ROWS", "INT32", ONE_PER_ROW, (ESTIMATOR, VERIFIER))
DRAFTS = WireTensor("DRAFTS", "INT32", "drafted_count", (VERIFIER,))


@dataclass
class Draft(Message):
    """What the drafter proposes: for each row `drafted_count` tokens, each with the distribution it was drawn from.

    A draft's distribution q is sparse: `candidate_count` token ids and their probabilities, which sum to 1. Greedy,
    coupled and looked-up rows have one candidate of probability 1: given the seed, nothing about the draft is random.
    """

    shared_fields = frozenset({"draft_cost"})
    ranges: ClassVar[dict[str, Range]] = {
        "drafted_count": Range(0, _MAX_INT32, "at least 0"),
        "draft_status": Range(0, _MAX_INT32, "at least 0"),
        "draft_match_length": Range(0, _MAX_INT32, "at least 0"),
        "draft_tokens": Range(0, _MAX_INT32, "a token id of the target"),
        "candidate_count": Range(0, _MAX_INT32, "at least 0"),
        "candidate_ids": Range(0, _MAX_INT32, "a token id of the target"),
        "candidate_probs": Range(0, _MAX_FLOAT32, "finite and at least 0"),
    }

    drafted_count: Tensor = line_of(DRAFT_ROWS)
    draft_status: Tensor = line_of(DRAFT_ROWS)  # STATUS_*; a row that is not ok has no drafts
    draft_match_length: Tensor = line_of(
        DRAFT_ROWS
    )  # tokens of the earlier occurrence that the row's drafts were looked up after; 0: they are a model's

    draft_tokens: Tensor = line_of(DRAFTS)
    candidate_count: Tensor = line_of(DRAFTS)

    draft_log_odds: Tensor = alone(
        "FP32", "drafted_count", ESTIMATOR
    )  # of the drafter's most likely token, see `estimation.features`
    draft_features: Tensor = wide(
        "FP32", "drafted_count", ESTIMATOR
    )  # what else was measured of each draft's distribution, `estimation.features.DRAFT_FEATURES`; or empty
    candidate_ids: Tensor = alone("INT32", "candidate_count", VERIFIER)
    candidate_probs: Tensor = alone("FP32", "candidate_count", VERIFIER)
    draft_cost: Tensor = alone("FP32", ANY_LENGTH)  # `DraftCost`


ESTIMATE_ROWS = WireTensor("ESTIMATE_ROWS", "INT32", ONE_PER_ROW)


@dataclass
class Estimate(Message):
    """What the estimator decides: the verifier sees each row's first `admitted_count` drafts only."""

    shared_fields = frozenset({"estimate_cost"})

    admitted_count: Tensor = line_of(ESTIMATE_ROWS)
    next_draft_limit: Tensor = line_of(
        ESTIMATE_ROWS
    )  # how deep drafting with a model pays in this row's next step; NOT_FOLLOWED

    estimate_cost: Tensor = alone("FP32", ANY_LENGTH)  # milliseconds, one number


RESULT_ROWS = WireTensor("RESULT_ROWS", "INT32", ONE_PER_ROW)


@dataclass
class StepResult(Message):
    """What the step gives back: for each row its accepted drafts and the one token after them."""

    shared_fields = frozenset({"step_cost"})

    output_count: Tensor = line_of(RESULT_ROWS)  # 0 for rows that only fill, or whose status is not ok
    status: Tensor = line_of(RESULT_ROWS)  # STATUS_*
    drafted_count: Tensor = line_of(RESULT_ROWS)  # the Draft's
    admitted_count: Tensor = line_of(RESULT_ROWS)  # the Estimate's; accepted: output_count - 1
    next_draft_limit: Tensor = line_of(RESULT_ROWS)  # the Estimate's
    hidden_start: Tensor = line_of(RESULT_ROWS)  # the position of the row's first hidden state
    hidden_count: Tensor = line_of(RESULT_ROWS)  # 0 where the drafter needs none

    output_tokens: Tensor = alone("INT32", "output_count")
    log_probs: Tensor = alone("FP32", "output_count")  # of the target's untransformed distribution; NaN if not wanted
    hidden_states: Tensor = wide("UINT8", "hidden_count")  # of the tokens confirmed in this step, in the target's dtype
    step_cost: Tensor = alone("FP32", ANY_LENGTH)  # `StepCost`


def refuse_unknown_tokens(name: str, token_ids: Tensor, vocab_size: int) -> None:
    """Refuses token ids, on the host, that the target does not have.

    Raises:
        ContractError: naming the field, the first such id and what is allowed.
    """
    ids = token_ids.numpy()
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ContractError(f"{name} has {wrong}; a token id of the target is 0 to {vocab_size - 1}")

"""The four messages of one decode step, each a bundle of flat tensors.

    StepRequest  the caller's, to every stage
    Draft        drafter -> estimator, verifier
    Estimate     estimator -> verifier
    StepResult   verifier -> caller; the whole step's answer

This module owns the tensors' names (a field's name in capitals), element types and lengths. A tensor is 1-D here and
`[1, length]` on the wire. It knows nothing of Triton (`contract.wire` does) and nothing of what the stages compute.

Ragged values lie end to end; a count tensor of the same message, or of the request, says how many belong to each row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

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

ONE_PER_ROW = "one per row"
ANY_LENGTH = "any length"

M = TypeVar("M", bound="Message")
Range = tuple[Callable[[np.ndarray], np.ndarray], str]


DRAFTER = "drafter"
ESTIMATOR = "av_estimator"
VERIFIER = "verifier"
_ALL_STAGES = (DRAFTER, ESTIMATOR, VERIFIER)


@dataclass(frozen=True)
class TensorSpec:
    """What one field of a message looks like on the wire.

    `length` is `ONE_PER_ROW`, `ANY_LENGTH` or the name of the count field of the same message whose sum it is; of a
    tensor that `is_wide` each entry is a run of values, all of one width, which may be 0.
    64-bit unsigned wire types are kept as int64 with the same bits, because torch does no arithmetic on uint64.
    `read_by` names the stages that are sent the tensor: each costs some 0.05 ms of every step.
    """

    name: str
    dtype: torch.dtype
    wire_type: str
    length: str
    read_by: tuple[str, ...]
    is_wide: bool = False


def _tensor(dtype: torch.dtype, wire_type: str, length: str, read_by: tuple[str, ...], *, is_wide: bool = False) -> Any:
    return dataclasses.field(
        metadata={
            "dtype": dtype,
            "wire_type": wire_type,
            "length": length,
            "read_by": read_by or _ALL_STAGES,
            "is_wide": is_wide,
        }
    )


def _int32(length: str, *read_by: str) -> Any:
    return _tensor(torch.int32, "INT32", length, read_by)


def _float32(length: str, *read_by: str) -> Any:
    return _tensor(torch.float32, "FP32", length, read_by)


def _uint64(length: str, *read_by: str) -> Any:
    return _tensor(torch.int64, "UINT64", length, read_by)


def _wide_bytes(length: str, *read_by: str) -> Any:
    return _tensor(torch.uint8, "UINT8", length, read_by, is_wide=True)


def _wide_float32(length: str, *read_by: str) -> Any:
    return _tensor(torch.float32, "FP32", length, read_by, is_wide=True)


@dataclass
class Message:
    """A bundle of flat tensors that can be validated, concatenated with others of its kind, and split again."""

    shared_fields: ClassVar[frozenset[str]] = frozenset()
    """Free-length fields that describe the whole step: `split` hands them to every part, `concatenate` keeps the first
    that is not empty. Other free-length fields are concatenated, and not split."""

    ranges: ClassVar[dict[str, Range]] = {}
    """Field -> which values are allowed, as a test and in words."""

    @classmethod
    def specs(cls, reader: str | None = None) -> dict[str, TensorSpec]:
        """Field name -> specification, in declaration order; only what a stage reads, where one is named."""
        specs = _specs(cls)  # type: ignore[arg-type]  # a class is hashable, though its instances are not
        return specs if reader is None else {name: spec for name, spec in specs.items() if reader in spec.read_by}

    @property
    def num_rows(self) -> int:
        """How many sequences the message speaks of."""
        row_field = next(name for name, spec in self.specs().items() if spec.length == ONE_PER_ROW)
        return int(getattr(self, row_field).numel())

    def validate(self: M, reader: str | None = None) -> M:
        """Checks types, dimensions, ranges, and that every ragged length equals the sum of its counts; returns self.

        Args:
            reader: a stage whose copy of the message this is: what it is not sent is empty, and not checked.

        Raises:
            ContractError: naming the tensor, what it is and what it must be.
        """
        num_rows = self.num_rows
        for field_name, spec in self.specs(reader).items():
            tensor = getattr(self, field_name)
            if tensor.dim() != 1 or tensor.dtype != spec.dtype:
                raise ContractError(
                    f"{spec.name} is {list(tensor.shape)} {tensor.dtype}; it must be one-dimensional {spec.dtype}"
                )
            if spec.length == ANY_LENGTH:
                continue
            if spec.length == ONE_PER_ROW:
                expected, reason = num_rows, f"one entry for each of the {num_rows} rows"
            else:
                expected, reason = int(getattr(self, spec.length).sum()), f"the sum of {spec.length.upper()}"
            if spec.is_wide:
                left_over = tensor.numel() % expected if expected else tensor.numel()
                if left_over:
                    raise ContractError(
                        f"{spec.name} has {tensor.numel()} entries; it must have as many for each of {expected} "
                        f"({reason})"
                    )
                continue
            if tensor.numel() != expected:
                raise ContractError(f"{spec.name} has {tensor.numel()} entries; it must have {expected} ({reason})")
        for field_name, (is_allowed, allowed) in self.ranges.items():
            values = getattr(self, field_name).cpu().numpy()  # numpy: a tenth of torch's time on so few numbers
            holds = is_allowed(values)
            if not holds.all():
                row = int((~holds).nonzero()[0][0])
                raise ContractError(f"{field_name.upper()}[{row}] is {values[row]}; it must be {allowed}")
        return self

    @classmethod
    def concatenate(cls: type[M], parts: Sequence[M]) -> M:
        """One message with the rows of all parts in order."""
        if len(parts) == 1:
            return parts[0]
        joined = {}
        for field_name in cls.specs():
            tensors = [getattr(part, field_name) for part in parts]
            if field_name in cls.shared_fields:
                joined[field_name] = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
            else:
                joined[field_name] = torch.cat(tensors)
        return cls(**joined)

    def split(self: M, rows_per_part: Sequence[int]) -> list[M]:
        """The inverse of `concatenate`: parts of so many rows each."""
        if len(rows_per_part) == 1:
            return [self]
        pieces: dict[str, list[Tensor]] = {}
        for field_name, spec in self.specs().items():
            tensor = getattr(self, field_name)
            if spec.length == ANY_LENGTH:
                pieces[field_name] = [tensor] * len(rows_per_part)
            elif spec.length == ONE_PER_ROW:
                pieces[field_name] = list(tensor.split(list(rows_per_part)))
            else:
                lengths = [int(counts.sum()) for counts in pieces[spec.length]]
                pieces[field_name] = split_wide(tensor, lengths) if spec.is_wide else list(tensor.split(lengths))
        return [type(self)(**{name: parts[i] for name, parts in pieces.items()}) for i in range(len(rows_per_part))]


def split_wide(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """A wide tensor's parts of so many entries each."""
    width = tensor.numel() // max(sum(counts), 1)
    return list(tensor.split([count * width for count in counts]))


@dataclass
class StepRequest(Message):
    """What the caller asks of one step, for n rows.

    A row's confirmed tokens are the first `context_length` tokens of its sequence, sent before, followed by this
    request's `tokens`. The caller's tokens are the truth: a stage reuses what it has cached only where it equals them.
    """

    shared_fields = frozenset({"previous_cost", "evidence_key"})
    ranges: ClassVar[dict[str, Range]] = {
        "token_count": (lambda values: values >= 1, "at least 1"),
        "context_length": (lambda values: values >= 0, "at least 0"),
        "tokens": (lambda values: values >= 0, "a token id of the target"),
        "draft_limit": (lambda values: values >= FILL_ONLY, "at least -1"),
        "model_draft_limit": (lambda values: values >= 0, "at least 0"),
        "temperature": (lambda values: np.isfinite(values) & (values >= 0), "finite and at least 0"),
        "top_p": (lambda values: (values > 0) & (values <= 1), "above 0 and at most 1"),
        "top_k": (lambda values: values >= 0, "at least 0"),
        "acceptance": (lambda values: (values == REJECTION) | (values == COUPLED), "0 or 1"),
        "previous_accepted": (lambda values: values >= NO_LABEL, "at least -1"),
        "previous_hidden_start": (lambda values: values >= 0, "at least 0"),
        "previous_hidden_count": (lambda values: values >= 0, "at least 0"),
    }

    sequence_id: Tensor = _uint64(ONE_PER_ROW)  # chosen by the caller
    context_length: Tensor = _int32(ONE_PER_ROW)  # confirmed tokens before this request's tokens
    token_count: Tensor = _int32(ONE_PER_ROW)  # at least 1
    tokens: Tensor = _int32("token_count", DRAFTER, VERIFIER)  # newly confirmed tokens
    draft_limit: Tensor = _int32(ONE_PER_ROW)  # at most so many drafts; 0: sample one token; FILL_ONLY
    model_draft_limit: Tensor = _int32(
        ONE_PER_ROW, DRAFTER, ESTIMATOR
    )  # and so many of them from a model, whose depth costs: what the last step advised; looked-up drafts are free
    temperature: Tensor = _float32(ONE_PER_ROW, DRAFTER, VERIFIER)  # 0: greedy
    top_p: Tensor = _float32(ONE_PER_ROW, DRAFTER, VERIFIER)  # in (0, 1]; 1: off
    top_k: Tensor = _int32(ONE_PER_ROW, DRAFTER, VERIFIER)  # 0: off
    seed: Tensor = _uint64(ONE_PER_ROW, DRAFTER, VERIFIER)
    acceptance: Tensor = _int32(ONE_PER_ROW)  # REJECTION or COUPLED
    previous_accepted: Tensor = _int32(
        ONE_PER_ROW, ESTIMATOR
    )  # drafts of the last step that the target accepted; NO_LABEL
    previous_cost: Tensor = _float32(ANY_LENGTH, ESTIMATOR)  # the last result's STEP_COST, or empty
    previous_hidden_start: Tensor = _int32(ONE_PER_ROW, DRAFTER)  # the position of the row's first hidden state
    previous_hidden_count: Tensor = _int32(ONE_PER_ROW, DRAFTER)  # 0 where there are none to hand on
    previous_hidden_states: Tensor = _wide_bytes("previous_hidden_count", DRAFTER)  # as the last result gave them
    release: Tensor = _uint64(ANY_LENGTH)  # sequences to forget
    evidence_key: Tensor = _uint64(
        ANY_LENGTH, ESTIMATOR
    )  # proves that this caller's labels may teach the estimator, or empty

    @property
    def samples(self) -> Tensor:
        """Which rows ask for tokens, rather than only filling the caches. `[rows]` bool."""
        return self.draft_limit != FILL_ONLY

    def validate(self, reader: str | None = None) -> StepRequest:
        super().validate(reader)
        if len(set(self.sequence_id.tolist())) != self.num_rows:
            raise ContractError("SEQUENCE_ID names a sequence twice; a sequence can be in one row of a step only")
        return self


@dataclass
class Draft(Message):
    """What the drafter proposes: for each row `drafted_count` tokens, each with the distribution it was drawn from.

    A draft's distribution q is sparse: `candidate_count` token ids and their probabilities, which sum to 1. Greedy,
    coupled and looked-up rows have one candidate of probability 1: given the seed, nothing about the draft is random.
    """

    shared_fields = frozenset({"draft_cost"})

    drafted_count: Tensor = _int32(ONE_PER_ROW)
    draft_status: Tensor = _int32(ONE_PER_ROW)  # STATUS_*; a row that is not ok has no drafts
    draft_match_length: Tensor = _int32(
        ONE_PER_ROW, ESTIMATOR
    )  # tokens of the earlier occurrence that the row's drafts were looked up after; 0: they are a model's
    draft_tokens: Tensor = _int32("drafted_count", VERIFIER)
    draft_log_odds: Tensor = _float32(
        "drafted_count", ESTIMATOR
    )  # of the drafter's most likely token, see `estimation.features`
    draft_features: Tensor = _wide_float32(
        "drafted_count", ESTIMATOR
    )  # what else was measured of each draft's distribution, `estimation.features.DRAFT_FEATURES`; or empty
    candidate_count: Tensor = _int32("drafted_count", VERIFIER)
    candidate_ids: Tensor = _int32("candidate_count", VERIFIER)
    candidate_probs: Tensor = _float32("candidate_count", VERIFIER)
    draft_cost: Tensor = _float32(ANY_LENGTH)  # `DraftCost`


@dataclass
class Estimate(Message):
    """What the estimator decides: the verifier sees each row's first `admitted_count` drafts only."""

    shared_fields = frozenset({"estimate_cost"})

    admitted_count: Tensor = _int32(ONE_PER_ROW)
    next_draft_limit: Tensor = _int32(
        ONE_PER_ROW
    )  # how deep drafting with a model pays in this row's next step; NOT_FOLLOWED
    estimate_cost: Tensor = _float32(ANY_LENGTH)  # milliseconds, one number


@dataclass
class StepResult(Message):
    """What the step gives back: for each row its accepted drafts and the one token after them."""

    shared_fields = frozenset({"step_cost"})

    output_count: Tensor = _int32(ONE_PER_ROW)  # 0 for rows that only fill, or whose status is not ok
    status: Tensor = _int32(ONE_PER_ROW)  # STATUS_*
    drafted_count: Tensor = _int32(ONE_PER_ROW)  # the Draft's
    admitted_count: Tensor = _int32(ONE_PER_ROW)  # the Estimate's; accepted: output_count - 1
    next_draft_limit: Tensor = _int32(ONE_PER_ROW)  # the Estimate's
    output_tokens: Tensor = _int32("output_count")
    log_probs: Tensor = _float32("output_count")  # of the target's untransformed distribution
    hidden_start: Tensor = _int32(ONE_PER_ROW)  # the position of the row's first hidden state
    hidden_count: Tensor = _int32(ONE_PER_ROW)  # 0 where the drafter needs none
    hidden_states: Tensor = _wide_bytes("hidden_count")  # of the tokens confirmed in this step, in the target's dtype
    step_cost: Tensor = _float32(ANY_LENGTH)  # `StepCost`


@functools.cache
def _specs(message_type: type[Message]) -> dict[str, TensorSpec]:
    return {
        field.name: TensorSpec(name=field.name.upper(), **field.metadata) for field in dataclasses.fields(message_type)
    }

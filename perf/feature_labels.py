"""The labelled drafts of recorded traces as flat arrays, and what each request's own past says about them.

Pure functions of traces; nothing of servers and fits. Shapes: `[labels]` where not said otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaptive_verification.errors import TraceError
from adaptive_verification.estimation.evidence import history_feature
from adaptive_verification.estimation.features import Feature
from adaptive_verification.estimation.trace import Trace, TraceStep

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Labels:
    """The drafts that the target decided, in the order of the stream."""

    num_positions: int
    """K."""
    position: NDArray[np.int64]
    """From 0."""
    accepted: NDArray[np.bool_]
    request: NDArray[np.int64]
    """From 0, numbered as they first appear."""
    block: NDArray[np.int64]
    """Which of the stream's blocks (the drafts of one request in one step) a draft belongs to."""
    step: NDArray[np.int64]
    """Of the stream: how many folds came before this one."""
    log_odds: NDArray[np.float32]
    draft_features: NDArray[np.float32]
    """`[labels, 3]`, `features.DRAFT_FEATURES`."""

    @classmethod
    def of(cls, trace: Trace) -> Labels:
        """Raises TraceError: there are none, or the trace lacks requests or what the drafter measured."""
        parts = []
        blocks = 0
        for number, step in enumerate(trace.steps):
            if step.sequences is None or step.draft_features is None:
                raise TraceError(f"steps[{number}] has no sequences or no draft_features")
            accepted, decided = step.labels()
            row, position = decided.nonzero()
            parts.append(
                (
                    position,
                    accepted[row, position],
                    np.asarray(step.sequences, dtype=np.int64)[row],
                    blocks + row,
                    np.full(len(row), number),
                    step.log_odds[row, position],
                    step.draft_features[row, position],
                )
            )
            blocks += len(step.admitted)
        if not any(len(part[0]) for part in parts):
            raise TraceError("there is no labelled draft")
        position, accepted, sequence, *others = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(trace.num_positions, position, accepted, _numbered(sequence), *others)

    def __len__(self) -> int:
        return len(self.position)

    @property
    def num_requests(self) -> int:
        return int(self.request.max()) + 1

    def feature(self, feature: Feature) -> Floats:
        """The feature's values."""
        values = feature(torch.from_numpy(self.log_odds), torch.from_numpy(self.draft_features))
        return values.numpy().astype(np.float64)


def joined(traces: Sequence[Trace]) -> Trace:
    """The traces as one stream with the first one's constants; sequences of different traces are different requests.

    Raises:
        TraceError: there is none, they have different numbers of positions, or one does not tell requests apart.
    """
    if len({trace.num_positions for trace in traces}) != 1:
        raise TraceError("there must be at least one trace, and all with the same num_speculative_tokens")
    steps: list[TraceStep] = []
    number_of: dict[tuple[int, int], int] = {}
    for trace_number, trace in enumerate(traces):
        for step in trace.steps:
            if step.sequences is None:
                raise TraceError("a trace without `sequences` does not tell requests apart")
            keys = ((trace_number, sequence) for sequence in step.sequences)
            sequences = [number_of.setdefault(key, len(number_of)) for key in keys]
            steps.append(dataclasses.replace(step, sequences=sequences))
    return Trace(traces[0].constants, traces[0].num_positions, steps)


def count_labels(lines: Iterable[Mapping[str, Any]]) -> int:
    """Labelled drafts in a recording's lines, as the estimator writes them."""
    return sum(
        min(accepted + 1, admitted)
        for line in lines
        if "features" in line
        for accepted, admitted in zip(line["accepted"], line["admitted"], strict=True)
    )


def history(labels: Labels, predicted: Floats) -> Floats:
    """Each request's residual history before each of its blocks, as the estimator has it: see `estimation.evidence`.

    Args:
        predicted: acceptance probabilities without it.
    """
    block, first_label = np.unique(labels.block, return_index=True)
    of_label = np.searchsorted(block, labels.block)
    request = labels.request[first_label]
    sums = [
        _sum_before(np.bincount(of_label, values).astype(np.float64), request).astype(np.float32)
        for values in (labels.accepted - predicted, predicted * (1 - predicted))
    ]
    return history_feature(*sums)[of_label].astype(np.float64)


def _sum_before(values: Floats, group: NDArray[np.int64]) -> Floats:
    """For each value the sum of the earlier ones of its group."""
    order = group.argsort(kind="stable")
    total = np.concatenate([[0.0], values[order].cumsum()])[:-1]  # of everything before, whatever its group
    first_of_group = np.searchsorted(group[order], group[order])
    before = np.empty_like(values)
    before[order] = total - total[first_of_group]
    return before


def _numbered(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Equal keys get equal numbers, from 0 in the order of first appearance."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]

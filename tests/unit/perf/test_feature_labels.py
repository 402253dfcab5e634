"""Labels from traces, and each request's history, against plain loops over their definitions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from perf.feature_labels import Labels, count_labels, history, joined
from tests.unit.perf.made_traces import made_trace

from adaptive_verification.errors import TraceError
from adaptive_verification.estimation.evidence import PRIOR_INFORMATION
from adaptive_verification.estimation.features import DRAWN_LOG_ODDS, FEATURES


def test_the_labels_are_the_accepted_drafts_and_the_first_rejected() -> None:
    trace = made_trace(steps=25)
    expected = [
        (number, position, position < accepted, step.log_odds[row, position])
        for number, step in enumerate(trace.steps)
        for row, accepted in enumerate(step.accepted)
        for position in range(min(accepted + 1, step.admitted[row]))
    ]
    labels = Labels.of(trace)
    made = list(zip(labels.step, labels.position, labels.accepted, labels.log_odds, strict=True))
    assert made == expected
    assert labels.num_requests == 32
    np.testing.assert_array_equal(labels.draft_features[:, DRAWN_LOG_ODDS], labels.log_odds)
    np.testing.assert_array_equal(labels.feature(FEATURES["entropy"]), labels.draft_features[:, 0])


def test_drafts_that_were_trimmed_have_no_label() -> None:
    step = made_trace(steps=1).steps[0]
    trimmed = dataclasses.replace(step, admitted=np.ones(16, dtype=np.int64), accepted=np.minimum(step.accepted, 1))
    assert set(Labels.of(dataclasses.replace(made_trace(), steps=[trimmed])).position) == {0}


def test_the_count_of_a_recordings_lines_is_the_number_of_labels() -> None:
    trace = made_trace()
    lines = [
        {"features": step.log_odds.tolist(), "admitted": step.admitted.tolist(), "accepted": step.accepted.tolist()}
        for step in trace.steps
    ]
    assert count_labels([{"num_speculative_tokens": 3}, *lines, {"ended": "stopped"}]) == len(Labels.of(trace))


def test_the_history_is_what_a_request_has_seen_before_the_block() -> None:
    labels = Labels.of(made_trace(steps=45))
    predicted = np.random.default_rng(1).uniform(0.05, 0.95, len(labels))
    made = history(labels, predicted)
    for i in range(len(labels)):
        earlier = (labels.request == labels.request[i]) & (labels.step < labels.step[i])
        residual = (labels.accepted - predicted)[earlier].sum()
        information = (predicted * (1 - predicted))[earlier].sum()
        assert made[i] == pytest.approx(residual / (information + PRIOR_INFORMATION), abs=1e-5)


def test_sequences_of_different_traces_are_different_requests() -> None:
    first, second = made_trace(), made_trace(seed=1)
    together = joined([first, second])
    labels = Labels.of(together)
    assert labels.num_requests == 2 * Labels.of(first).num_requests
    assert len(together.steps) == 120
    assert together.constants == first.constants


def test_traces_that_are_no_stream_are_refused() -> None:
    with pytest.raises(TraceError, match="at least one"):
        joined([])
    with pytest.raises(TraceError, match="same num_speculative_tokens"):
        joined([made_trace(), made_trace(num_positions=2)])
    trace = made_trace(steps=1)
    anonymous = dataclasses.replace(trace, steps=[dataclasses.replace(trace.steps[0], sequences=None)])
    with pytest.raises(TraceError, match="sequences"):
        joined([anonymous])
    unmeasured = dataclasses.replace(trace, steps=[dataclasses.replace(trace.steps[0], draft_features=None)])
    with pytest.raises(TraceError, match="draft_features"):
        Labels.of(unmeasured)
    with pytest.raises(TraceError, match="no labelled draft"):
        Labels.of(dataclasses.replace(trace, steps=[]))

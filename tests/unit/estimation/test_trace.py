from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.estimation.reference import ReferenceFit
from tests.unit.estimation.streams import make_stream

from adaptive_verification.errors import SettingsError, TraceError
from adaptive_verification.estimation.features import FEATURES
from adaptive_verification.estimation.trace import Trace, TraceConstants, replay, replay_feature

VLLM_TRACE = Path(os.environ.get("ADAPTIVE_VERIFICATION_TEST_DATA", "../shared/data")) / "vllm_estimator_trace.json"
CONSTANTS = {
    "init_slope": 0.5,
    "init_intercept": -0.2,
    "refit_interval": 10,
    "damping_observations": 50.0,
    "l2": 1e-3,
    "max_log_odds": 40.0,
}


def made_trace(steps: int = 40, **changes: Any) -> dict[str, Any]:
    """A stream of five positions, as JSON has it."""
    return {
        "constants": dict(CONSTANTS),
        "num_speculative_tokens": 5,
        "steps": [
            {
                "features": step.features[..., 0].tolist(),
                "admitted": step.admitted.tolist(),
                "accepted": step.accepted.tolist(),
            }
            for step in make_stream(1, steps=steps)
        ],
        **changes,
    }


def _with_constants(trace: Trace, **changes: Any) -> TraceConstants:
    return TraceConstants.model_validate(trace.constants.model_dump() | changes)


def test_a_replay_refits_as_the_full_system_solved_in_float64() -> None:
    trace = Trace.from_json(made_trace())
    refits = replay(trace, trace.constants).coefficients
    reference = ReferenceFit(5, refit_interval=10)
    expected = []
    for number, step in enumerate(make_stream(1, steps=40), start=1):
        reference.fold(step.features, step.admitted, step.accepted)
        if number % 10 == 0:
            expected.append((number, [*reference.shared, *reference.intercepts]))
    assert [refit["after_steps"] for refit in refits] == [number for number, _ in expected]
    for refit, (_, coefficients) in zip(refits, expected, strict=True):
        np.testing.assert_allclose([refit["slope"], *refit["intercepts"]], coefficients, atol=1e-5)


@pytest.mark.skipif(not VLLM_TRACE.exists(), reason=f"{VLLM_TRACE} is not there")
def test_vllms_own_trace_replays_to_its_coefficients() -> None:
    trace = Trace.read(VLLM_TRACE)
    refits = replay(trace, trace.constants).coefficients
    for refit, expected in zip(refits, json.loads(VLLM_TRACE.read_text())["coefficients"], strict=True):
        assert set(refit) == set(expected)
        assert refit["after_steps"] == expected["after_steps"]
        np.testing.assert_allclose(
            [refit["slope"], *refit["intercepts"]], [expected["slope"], *expected["intercepts"]], atol=1e-5
        )


@pytest.mark.parametrize(
    "change",
    [
        {"init_slope": 1.5},
        {"init_intercept": 0.5},
        {"refit_interval": 20},
        {"damping_observations": 500.0},
        {"l2": 5.0},
        {"max_log_odds": 0.5},
        {"feature": "gumbel_q_max"},
    ],
)
def test_every_constant_counts(change: dict[str, Any]) -> None:
    trace = Trace.from_json(made_trace())
    own, changed = (replay(trace, _with_constants(trace, **values)).coefficients[-1] for values in ({}, change))
    assert own["after_steps"] == changed["after_steps"] == 40
    assert abs(own["slope"] - changed["slope"]) > 1e-4


def test_predictions_are_judged_as_made_before_their_labels() -> None:
    """No refit within the trace, so every prediction is the cold fit's."""
    trace = Trace.from_json(made_trace(steps=9))
    log_losses = []
    for step in make_stream(1, steps=9):
        p = 1 / (1 + np.exp(-(0.5 * step.features[..., 0] - 0.2)))
        for row, position in np.ndindex(p.shape):
            if position < step.admitted[row] and position <= step.accepted[row]:
                log_losses.append(-np.log(p[row, position] if position < step.accepted[row] else 1 - p[row, position]))
    overall = replay(trace, trace.constants).calibration.report()
    assert overall.labels == len(log_losses)
    assert overall.log_loss == pytest.approx(np.mean(log_losses), abs=1e-5)


def test_a_feature_without_a_fit_is_judged_and_never_refitted() -> None:
    trace = Trace.from_json(made_trace())
    result = replay(trace, _with_constants(trace, feature="q_max_unfitted"))
    assert result.coefficients == []
    assert result.calibration.report().labels > 100


def test_a_feature_that_biases_the_output_is_refused() -> None:
    trace = Trace.from_json(made_trace())
    with pytest.raises(SettingsError, match="logit_q_drawn"):
        replay(trace, _with_constants(trace, feature="logit_q_drawn"))


def test_a_feature_that_was_not_measured_cannot_be_replayed() -> None:
    trace = Trace.from_json(made_trace())
    with pytest.raises(TraceError, match="feature='entropy' needs `draft_features`"):
        replay(trace, _with_constants(trace, feature="entropy"))


def test_a_study_may_replay_a_lossy_feature() -> None:
    content = made_trace()
    for step in content["steps"]:
        step["draft_features"] = [[[0.0, 0.0, value] for value in row] for row in step["features"]]
    trace = Trace.from_json(content)
    lossy = replay_feature(trace, trace.constants, FEATURES["logit_q_drawn"])
    assert lossy.coefficients == replay(trace, trace.constants).coefficients


def test_the_requests_history_needs_a_trace_that_tells_requests_apart() -> None:
    trace = Trace.from_json(made_trace())
    with pytest.raises(TraceError, match="sequences"):
        replay(trace, _with_constants(trace, evidence="history"))


def test_steps_without_rows_count_as_folds() -> None:
    empty: dict[str, Any] = {"features": [], "admitted": [], "accepted": []}
    trace = Trace.from_json(made_trace(steps=5) | {"steps": [empty] * 5 + made_trace(steps=5)["steps"]})
    assert [refit["after_steps"] for refit in replay(trace, trace.constants).coefficients] == [10]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"constants": {}}, "refit_interval"),
        ({"constants": CONSTANTS | {"refit_interval": 0}}, "refit_interval"),
        ({"constants": CONSTANTS | {"init_slope": "steep"}}, "init_slope"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 4}, r"steps\[0\].features must be 16 rows of 4"),
        ({"steps": None}, "NoneType"),
        ({"steps": [{"features": [[0.0] * 5], "admitted": [1], "accepted": [2]}]}, r"steps\[0\].accepted"),
        ({"steps": [{"features": [[0.0] * 5], "admitted": [6], "accepted": [2]}]}, r"steps\[0\].admitted"),
        ({"steps": [{"features": [[0.0] * 5], "admitted": [1]}]}, "accepted"),
        ({"steps": [{"features": [[1e999] * 5], "admitted": [1], "accepted": [1]}]}, "finite"),
        (
            {"steps": [{"features": [[0.0] * 5], "draft_features": [[[0.0]] * 5], "admitted": [1], "accepted": [1]}]},
            r"steps\[0\].draft_features must be 1 rows of 5 times 3",
        ),
        (
            {"steps": [{"features": [[0.0] * 5] * 2, "admitted": [1, 1], "accepted": [1, 1], "sequences": [3, 3]}]},
            r"steps\[0\].sequences",
        ),
    ],
)
def test_a_damaged_trace_is_refused_and_the_message_says_where(
    damage: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(made_trace(steps=2) | damage))
    with pytest.raises(TraceError, match=message):
        Trace.read(path)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no file"):
        Trace.read(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.read(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(TraceError, match="is no trace"):
        Trace.read(tmp_path / "list.json")

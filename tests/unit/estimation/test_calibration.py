from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adaptive_verification.estimation.calibration import Calibration


def _auc(probability: NDArray[Any], accepted: NDArray[Any]) -> float:
    """The definition: how often an accepted draft is ranked above a rejected one."""
    above = probability[accepted][:, None] - probability[~accepted][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def _stream(seed: int, steps: int = 40) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    random, stream = np.random.default_rng(seed), []
    for _ in range(steps):
        probability = random.beta(2, 1, (16, 4)).astype(np.float32)
        accepted, labelled = random.random((16, 4)) < probability**1.5, random.random((16, 4)) < 0.7
        stream.append((probability, accepted.astype(np.float32), labelled.astype(np.float32)))
    return stream


@pytest.mark.parametrize("position", [None, 0, 3])
def test_the_report_equals_the_definitions(position: int | None) -> None:
    calibration = Calibration(4)
    stream = _stream(1)
    for step in stream:
        calibration.update(*step)
    chosen = slice(None) if position is None else slice(position, position + 1)
    probability = np.concatenate([p[:, chosen][labelled[:, chosen] > 0] for p, _, labelled in stream]).astype(float)
    accepted = np.concatenate([y[:, chosen][labelled[:, chosen] > 0] for _, y, labelled in stream]) > 0
    report = calibration.report(position)
    assert report.labels == len(probability)
    assert report.acceptance_rate == pytest.approx(accepted.mean())
    assert report.auc == pytest.approx(_auc(probability, accepted), abs=1e-3)
    log_loss = -np.log(np.where(accepted, probability, 1 - probability)).mean()
    assert report.log_loss == pytest.approx(log_loss, rel=1e-6)
    bins = np.minimum((probability * 10).astype(int), 9)
    error = sum(abs((accepted - probability)[bins == b].sum()) for b in range(10)) / len(probability)
    assert report.calibration_error == pytest.approx(error, rel=1e-6)


def test_perfect_ranking_and_certain_mistakes_are_finite() -> None:
    calibration = Calibration(1)
    everything = np.ones((2, 1), dtype=np.float32)
    calibration.update(np.array([[0.0], [1.0]], dtype=np.float32), np.array([[0], [1]], dtype=np.float32), everything)
    assert calibration.report().auc == 1.0
    calibration.update(np.array([[0.0], [1.0]], dtype=np.float32), np.array([[1], [0]], dtype=np.float32), everything)
    assert calibration.report().auc == 0.5
    assert 0 < (calibration.report().log_loss or 0) < 20


def test_without_labels_there_is_nothing_to_report() -> None:
    calibration = Calibration(3)
    nothing = np.zeros((0, 3), dtype=np.float32)
    calibration.update(nothing, nothing, nothing)
    report = calibration.report(2)
    assert (report.labels, report.auc, report.log_loss, report.calibration_error) == (0.0, None, None, None)


def test_old_labels_count_half_after_the_half_life() -> None:
    calibration = Calibration(1, half_life_steps=10)
    label, prediction = np.ones((1, 1), dtype=np.float32), np.full((1, 1), 0.5, dtype=np.float32)
    calibration.update(prediction, label, label)
    for _ in range(10):
        calibration.update(prediction, 1 - label, label)
    report = calibration.report()
    assert report.labels * (report.acceptance_rate or 0) == pytest.approx(0.5)


def test_fading_for_very_long_keeps_the_numbers_right() -> None:
    calibration = Calibration(1, half_life_steps=1)
    label, prediction = np.ones((1, 1), dtype=np.float32), np.full((1, 1), 0.5, dtype=np.float32)
    for _ in range(5000):
        calibration.update(prediction, label, label)
    assert calibration.report().labels == pytest.approx(2.0, rel=1e-4)


def test_the_reliability_diagram_sums_to_the_report() -> None:
    calibration = Calibration(4)
    for step in _stream(2):
        calibration.update(*step)
    diagram, report = calibration.reliability(), calibration.report()
    assert sum(labels for _, _, labels in diagram) == pytest.approx(report.labels)
    error = sum(abs(rate - predicted) * labels for predicted, rate, labels in diagram) / report.labels
    assert error == pytest.approx(report.calibration_error)


def test_it_survives_being_written_and_read() -> None:
    calibration, restored = Calibration(4, half_life_steps=100), Calibration(4, half_life_steps=100)
    for step in _stream(3):
        calibration.update(*step)
    restored.load_state_dict(json.loads(json.dumps(calibration.state_dict())))
    for position in (None, 0, 1, 2, 3):
        assert restored.report(position) == calibration.report(position)


@pytest.mark.parametrize(
    "damage",
    [
        {"log_loss": [0.0]},
        {"counts": {"index": [10**9], "value": [1.0]}},
        {"predicted": {"index": [0], "value": [float("nan")]}},
        {"counts": {"index": [0], "value": []}},
    ],
)
def test_a_state_that_does_not_fit_is_refused(damage: dict[str, Any]) -> None:
    calibration = Calibration(4)
    with pytest.raises(ValueError, match=r"must be|outside"):
        calibration.load_state_dict({**calibration.state_dict(), **damage})

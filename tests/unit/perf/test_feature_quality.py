"""AUC, calibration and differences against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from perf.feature_labels import Labels
from perf.feature_quality import auc, log_loss_difference, quality
from tests.unit.perf.made_traces import made_trace


def test_the_auc_is_the_share_of_pairs_in_the_right_order_ties_counting_half() -> None:
    random = np.random.default_rng(0)
    predicted, accepted = random.integers(0, 12, 80) / 12, random.random(80) < 0.4
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in predicted[accepted]
        for low in predicted[~accepted]
    ]
    one_group = np.zeros(80, dtype=np.int64)
    assert auc(predicted, accepted, one_group) == pytest.approx(np.mean(pairs))
    assert auc(predicted, np.ones(80, dtype=bool), one_group) is None


def test_groups_that_are_predicted_higher_than_others_do_not_change_the_auc() -> None:
    random = np.random.default_rng(0)
    predicted, accepted, group = random.random(80), random.random(80) < 0.4, np.arange(80) % 3
    within = [auc(predicted[group == i], accepted[group == i], group[group == i]) for i in range(3)]
    pairs = [accepted[group == i].sum() * (~accepted[group == i]).sum() for i in range(3)]
    assert auc(predicted + group, accepted, group) == pytest.approx(np.average(np.array(within), weights=pairs))


def test_quality_counts_the_chosen_labels_of_one_position() -> None:
    labels = Labels.of(made_trace())
    predicted = np.random.default_rng(0).uniform(0.1, 0.9, len(labels))
    chosen = labels.step >= 30
    counted = chosen & (labels.position == 1)
    report = quality(labels, predicted, 1, chosen)
    p, y = predicted[counted], labels.accepted[counted]
    bins = (p * 10).astype(int)
    ece = sum(abs((y - p)[bins == b].sum()) for b in range(10)) / len(p)
    assert report.labels == counted.sum()
    assert report.acceptance_rate == pytest.approx(y.mean())
    assert report.log_loss == pytest.approx(-np.where(y, np.log(p), np.log(1 - p)).mean(), abs=1e-6)
    assert report.calibration_error == pytest.approx(ece, abs=1e-6)


def test_the_interval_of_a_difference_covers_what_requests_differ_by() -> None:
    """The true difference, from very many requests, lies in about 95 of 100 intervals from few."""
    differences = []
    for seed in range(100):
        labels = Labels.of(made_trace(seed=seed, steps=20, rows=40, spread=1.0))
        first, second = 1 / (1 + np.exp(-labels.log_odds.astype(np.float64))), np.full(len(labels), 0.5)
        difference = log_loss_difference(labels, first, second)
        assert difference is not None
        differences.append(difference)
    means, half_widths = np.array(differences).T
    covered = np.abs(means - means.mean()) <= half_widths
    assert 88 <= covered.sum() <= 99


def test_a_difference_is_that_of_the_log_losses() -> None:
    labels = Labels.of(made_trace())
    first, second = np.full(len(labels), 0.3), np.full(len(labels), 0.6)
    difference = log_loss_difference(labels, first, second)
    losses = [quality(labels, predicted).log_loss or 0.0 for predicted in (first, second)]
    assert difference is not None
    assert difference.mean == pytest.approx(losses[0] - losses[1], abs=1e-6)
    assert log_loss_difference(labels, first, second, labels.step < 0) is None

"""A drafter's own account of its acceptance: kept beside it, and where a fresh estimator starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.estimation.chain import CURVES, MadeChain

from adaptive_verification.estimation.first_guess import FILE_NAME, FirstGuess, by_position, read_first_guess
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings
from adaptive_verification.training.evaluation import Acceptance
from adaptive_verification.training.first_guess import fit_first_guess
from adaptive_verification.training.jobs import Sampling

GUESS = FirstGuess(slope=0.8, intercepts=(-0.5, -0.7), mean_acceptance=(0.4, 0.3))


def _stage(guess: FirstGuess | None, **settings: object) -> EstimatorStage:
    values = {"max_draft_tokens": 7, "trim": "adaptive", **settings}
    return EstimatorStage(EstimatorSettings.model_validate(values), curves=CURVES, first_guess=guess)


def test_a_guess_survives_being_written_and_read(tmp_path: Path) -> None:
    GUESS.write(tmp_path)
    assert read_first_guess(str(tmp_path)) == GUESS


@pytest.mark.parametrize("name", ["lookup", "first-layers:6", "/there/is/no/such/directory"])
def test_most_drafters_have_none(name: str) -> None:
    assert read_first_guess(name) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"slope": -0.1},
        {"slope": None},
        {"intercepts": []},
        {"intercepts": [0.1, "x"]},
        {"mean_acceptance": [1.5]},
        {"mean_acceptance": [float("nan")]},
    ],
    ids=str,
)
def test_a_damaged_one_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    GUESS.write(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with caplog.at_level(logging.WARNING):
        assert read_first_guess(str(tmp_path)) is None
    assert FILE_NAME in caplog.text


def test_what_is_no_json_is_ignored_too(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert read_first_guess(str(tmp_path)) is None


def test_deeper_positions_are_like_the_last() -> None:
    assert by_position((0.4, 0.3), 4) == [0.4, 0.3, 0.3, 0.3]
    assert by_position((0.4, 0.3), 1) == [0.4]


def test_a_fresh_estimator_starts_from_the_guess() -> None:
    fit = _stage(GUESS, evidence="none").fit
    assert fit.shared.tolist() == pytest.approx([0.8])
    assert fit.intercepts.tolist() == pytest.approx([-0.5] + [-0.7] * 6)
    assert not fit.is_at_its_start
    assert _stage(None).fit.is_at_its_start


def test_another_features_coefficients_are_not_guessed_from_it() -> None:
    assert _stage(GUESS, feature="log_q_max").fit.is_at_its_start


def test_a_guess_that_nothing_pays_drafts_nothing_but_exploration() -> None:
    """Where nothing is known everything is tried first."""

    def drafted_in_the_beginning(guess: FirstGuess | None) -> int:
        chain = MadeChain(_stage(guess), rows=8, mean_log_odds=-6.0)
        chain.step()  # what the caller asks for before it was ever advised
        return sum(sum(chain.step()[1]) for _ in range(20))

    hopeless = FirstGuess(1.0, [0.0], [0.001])
    assert drafted_in_the_beginning(hopeless) < 20 < drafted_in_the_beginning(None)


def test_the_fit_finds_what_made_the_acceptance() -> None:
    rng = np.random.default_rng(0)
    log_odds = torch.from_numpy(rng.normal(0.5, 2.0, (4000, 3)))
    intercepts = torch.tensor([-0.3, -0.6, 0.2], dtype=torch.float64)
    overlap = torch.sigmoid(0.7 * log_odds + intercepts)
    halves = [
        Acceptance(Sampling(temperature), overlap[part], log_odds[part].float())
        for temperature, part in ((0.0, slice(0, 1500)), (1.0, slice(1500, None)))
    ]
    guess = fit_first_guess(halves)
    assert guess.slope == pytest.approx(0.7, abs=1e-3)
    assert list(guess.intercepts) == pytest.approx(intercepts.tolist(), abs=1e-3)
    assert list(guess.mean_acceptance) == pytest.approx(overlap.mean(0).tolist())

"""Fits what the estimator shall expect of a new drafter, from its held-out acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adaptive_verification.estimation.first_guess import FirstGuess
from adaptive_verification.estimation.online_fit import OnlineFit
from adaptive_verification.training.evaluation import Acceptance

_NEWTON_STEPS = 25


def fit_first_guess(acceptances: Sequence[Acceptance]) -> FirstGuess:
    """The estimator's own regression, run to its end over all samplings together.

    Each place counts with its probability of acceptance as the label, which is the mean of the labels that it would
    give.
    """
    log_odds = torch.cat([acceptance.log_odds for acceptance in acceptances]).to(torch.float64)  # [places, depth]
    overlap = torch.cat([acceptance.overlap for acceptance in acceptances]).clamp(0, 1)
    fit = OnlineFit(log_odds.shape[1], refit_interval=1, damping_labels=0.0, dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        fit.fold(log_odds.unsqueeze(-1), overlap, torch.ones_like(overlap))
    return FirstGuess(float(fit.shared[0]), fit.intercepts.tolist(), overlap.mean(0).tolist())

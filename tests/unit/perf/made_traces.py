"""Made traces of requests that differ in how often their drafts are accepted."""

from __future__ import annotations

import numpy as np

from adaptive_verification.estimation.trace import Trace, TraceConstants, TraceStep


def made_trace(
    *,
    steps: int = 60,
    rows: int = 16,
    num_positions: int = 3,
    slope: float = 0.8,
    spread: float = 0.0,
    seed: int = 0,
    steps_of_request: int = 20,
    refit_interval: int = 10,
) -> Trace:
    """Drafts accepted with probability sigmoid(slope * log-odds + intercept of the request); a row's request changes
    after so many steps, and the intercepts have this spread.

    The `draft_features` are the log-odds minus 2, noisy log-odds, and the log-odds as they are.
    """
    random = np.random.default_rng(seed)
    made = []
    intercepts = random.normal(0, spread, size=(steps // steps_of_request + 1, rows))
    for number in range(steps):
        generation = number // steps_of_request
        log_odds = random.normal(0, 2, size=(rows, num_positions)).astype(np.float32)
        noisy = log_odds + random.normal(0, 2, size=log_odds.shape)
        p = 1 / (1 + np.exp(-(slope * log_odds + intercepts[generation][:, None])))
        accepted = (random.random(p.shape) < p).cumprod(1).sum(1)
        features = np.stack([log_odds - 2, noisy, log_odds], axis=-1).astype(np.float32)
        sequences = [1000 * generation + row for row in range(rows)]
        made.append(TraceStep(log_odds, np.full(rows, num_positions), accepted, sequences, features))
    return Trace(TraceConstants(refit_interval=refit_interval, damping_observations=50.0), num_positions, made)

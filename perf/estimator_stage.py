"""Time of the estimator stage alone, by rows and drafts: fold labels and costs, score, budget, trim, plan, tensors.

    python perf/estimator_stage.py

One thread. Every size is timed in turn, round after round, so that a slow spell of the machine falls on all of them;
the table has medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from adaptive_verification.contract import Draft, DraftCost, StepCost, StepRequest
from adaptive_verification.contract.hidden_states import NO_STATES, for_rows
from adaptive_verification.estimation.cost_model import DRAFT_EXTEND, DRAFT_PREFILL, VERIFY, CostCurve
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.settings import EstimatorSettings
from perf.provenance import publish

SIZES = [(1, 7), (8, 7), (64, 7), (64, 16), (128, 16), (256, 16), (512, 16)]
KEY = 1
TRUE_SLOPE, TRUE_INTERCEPT = 0.6, 0.0
CURVES = {  # the default pair on two cores, roughly; dear enough that the budget has something to decide
    VERIFY: CostCurve((1, 8, 64, 512), (19.0, 22.0, 52.0, 277.0)),
    DRAFT_PREFILL: CostCurve((1, 64, 512), (1.0, 4.0, 30.0)),
    DRAFT_EXTEND: CostCurve((1, 64, 512), (0.2, 0.5, 4.0)),
}


class Traffic:
    """Rows that always draft to the full depth, and a target that accepts by the drafts' log-odds, so that every step
    has labels to fold and drafts worth verifying."""

    def __init__(self, rows: int, depth: int, policy: str) -> None:
        settings = EstimatorSettings.model_validate({"trim": policy})
        self.stage = EstimatorStage(settings, evidence_key=KEY, curves=CURVES)
        self._random = np.random.default_rng(rows * depth)
        self._rows, self._depth = rows, depth
        self._confirmed = torch.full((rows,), 100, dtype=torch.int32)
        self._accepted = torch.full((rows,), -1, dtype=torch.int32)

    def step(self) -> float:
        """Milliseconds of one step."""
        rows, drafts = self._rows, self._rows * self._depth
        one, zero = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        draft_cost = DraftCost(4.0, rows, 0.5 * (self._depth - 1), rows, self._depth)
        request = StepRequest(
            sequence_id=torch.arange(rows),
            context_length=self._confirmed - 1,
            token_count=one,
            tokens=zero,
            draft_limit=one * self._depth,
            model_draft_limit=one * self._depth,
            temperature=torch.ones(rows),
            top_p=torch.ones(rows),
            top_k=zero,
            seed=torch.zeros(rows, dtype=torch.int64),
            acceptance=zero,
            wants_log_probs=zero,
            previous_accepted=self._accepted,
            previous_cost=StepCost(draft_cost, 1.0, 52.0, rows, 1.5 * rows).to_tensor(),
            **for_rows([NO_STATES] * rows),
            release=torch.zeros(0, dtype=torch.int64),
            evidence_key=torch.tensor([KEY]),
        )
        log_odds = self._random.normal(1.0, 2.0, drafts).astype(np.float32)
        draft = Draft(
            drafted_count=one * self._depth,
            draft_status=zero,
            draft_match_length=zero,
            draft_tokens=torch.zeros(drafts, dtype=torch.int32),
            draft_log_odds=torch.from_numpy(log_odds),
            draft_features=torch.empty(0),
            candidate_count=torch.ones(drafts, dtype=torch.int32),
            candidate_ids=torch.zeros(drafts, dtype=torch.int32),
            candidate_probs=torch.ones(drafts),
            draft_cost=draft_cost.to_tensor(),
        )
        started = time.perf_counter()
        estimate = self.stage.step(request, draft)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        self._accepted = self._accept(log_odds.reshape(rows, self._depth), estimate.admitted_count)
        self._confirmed = self._confirmed + self._accepted + 1
        return elapsed_ms

    def _accept(self, log_odds: NDArray[np.float32], admitted: Tensor) -> Tensor:
        """How many of the admitted drafts the target accepts, `[rows]`."""
        probability = 1 / (1 + np.exp(-TRUE_INTERCEPT - TRUE_SLOPE * log_odds))
        accepted = self._random.random(log_odds.shape) < probability
        first_rejected = torch.from_numpy(accepted.cumprod(1).sum(1).astype(np.int32))
        return torch.minimum(first_rejected, admitted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="times that every size is measured (15)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each measurement (40)")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)

    times: dict[tuple[int, int, str], list[float]] = {}
    traffic = {
        (rows, depth, policy): Traffic(rows, depth, policy) for rows, depth in SIZES for policy in ("adaptive", "off")
    }
    for round_number in range(options.rounds + 1):
        for size, source in traffic.items():
            measured = [source.step() for _ in range(options.steps)]
            if round_number > 0:  # the first round warms up
                times.setdefault(size, []).append(statistics.median(measured))

    lines = ["| rows x drafts | `adaptive`, ms | fastest round | microseconds a draft | `off`, ms |", "|---" * 5 + "|"]
    for rows, depth in SIZES:
        adaptive, off = times[rows, depth, "adaptive"], times[rows, depth, "off"]
        median = statistics.median(adaptive)
        lines.append(
            f"| {rows} x {depth} | {median:.2f} | {min(adaptive):.2f} | {median * 1e3 / (rows * depth):.2f} "
            f"| {statistics.median(off):.2f} |"
        )
    publish([*lines, "", "One thread."], options.output)


if __name__ == "__main__":
    main()

"""The second stage of a step: see `adaptive_verification.estimation`."""

import json

import triton_python_backend_utils as pb_utils

from adaptive_verification.contract import ESTIMATOR, Draft, StepRequest
from adaptive_verification.contract.triton_stage import TritonStage
from adaptive_verification.drafting.hidden_state_kind import is_hidden_state_drafter
from adaptive_verification.estimation.first_guess import read_first_guess
from adaptive_verification.estimation.metrics import METRICS, MeteredEstimator
from adaptive_verification.estimation.stage import EstimatorStage
from adaptive_verification.estimation.warm_up import warm_up
from adaptive_verification.serving import environment
from adaptive_verification.serving.default_pair import resolve_drafter
from adaptive_verification.serving.metrics import TritonMetrics
from adaptive_verification.settings import EstimatorSettings


class TritonPythonModel:
    def initialize(self, args):
        settings = EstimatorSettings.from_parameters(json.loads(args["model_config"])["parameters"])
        drafter = resolve_drafter(settings.drafter, settings.target)
        stage = EstimatorStage(
            settings,
            evidence_key=environment.evidence_key(),
            first_guess=read_first_guess(drafter),
            needs_states=is_hidden_state_drafter(drafter),
        )
        warm_up(settings)
        self._estimator = MeteredEstimator(stage, TritonMetrics(pb_utils, METRICS))
        self._stage = TritonStage(
            pb_utils, ESTIMATOR, [StepRequest, Draft], self._estimator.step, stage.without_foreign_evidence
        )

    def execute(self, requests):
        return self._stage.execute(requests)

    def finalize(self):
        self._estimator.close()

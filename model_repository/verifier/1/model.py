"""The third stage of a step: see `adaptive_verification.verification`."""

import json

import triton_python_backend_utils as pb_utils

from adaptive_verification.contract import VERIFIER, Draft, Estimate, StepRequest
from adaptive_verification.contract.triton_stage import TritonStage
from adaptive_verification.settings import VerifierSettings
from adaptive_verification.verification.loading import load_verifier


class TritonPythonModel:
    def initialize(self, args):
        settings = VerifierSettings.from_parameters(json.loads(args["model_config"])["parameters"])
        self._stage = TritonStage(pb_utils, VERIFIER, [StepRequest, Draft, Estimate], load_verifier(settings).step)

    def execute(self, requests):
        return self._stage.execute(requests)

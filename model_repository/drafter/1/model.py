"""The first stage of a step: see `adaptive_verification.drafting`."""

import json

import triton_python_backend_utils as pb_utils

from adaptive_verification.contract import DRAFTER, StepRequest
from adaptive_verification.contract.triton_stage import TritonStage
from adaptive_verification.drafting.loading import load_drafter
from adaptive_verification.settings import DrafterSettings


class TritonPythonModel:
    def initialize(self, args):
        settings = DrafterSettings.from_parameters(json.loads(args["model_config"])["parameters"])
        self._stage = TritonStage(pb_utils, DRAFTER, [StepRequest], load_drafter(settings).step)

    def execute(self, requests):
        return self._stage.execute(requests)

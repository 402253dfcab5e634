"""The text front: Triton's requests -> the engine of `adaptive_verification.generation`, and its responses back."""

import json
import logging

import triton_python_backend_utils as pb_utils

from adaptive_verification.errors import AdaptiveVerificationError
from adaptive_verification.generation.engine import Engine
from adaptive_verification.generation.request import RequestParser
from adaptive_verification.generation.statistics import METRICS
from adaptive_verification.generation.text_codec import TextCodec
from adaptive_verification.generation.triton_sink import TritonSink, raw_inputs
from adaptive_verification.generation.triton_step import TritonStep
from adaptive_verification.serving import environment
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.serving.metrics import TritonMetrics
from adaptive_verification.settings import GenerateSettings

logger = logging.getLogger(__name__)


class TritonPythonModel:
    def initialize(self, args):
        settings = GenerateSettings.from_parameters(json.loads(args["model_config"])["parameters"])
        target = resolve_model(settings.target)
        codec = TextCodec.from_pretrained(target)
        self._parser = RequestParser(codec, settings)
        self._engine = Engine(
            TritonStep(),
            settings,
            new_detokenizer=codec.detokenizer,
            end_token_ids=codec.end_token_ids(target),
            evidence_key=environment.evidence_key(),
            metrics=TritonMetrics(pb_utils, METRICS),
        )

    def execute(self, requests):
        for request in requests:
            sink = TritonSink(request)
            try:
                self._engine.submit(self._parser.parse(raw_inputs(request)), sink)
            except AdaptiveVerificationError as error:
                sink.fail(error)
            except Exception:
                logger.exception("a request could not be read")
                sink.fail(AdaptiveVerificationError("the request could not be read; the server's log says why"))

    def finalize(self):
        self._engine.close()

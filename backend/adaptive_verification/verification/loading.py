"""Makes the verifier that the settings name."""

from __future__ import annotations

from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.loading import model_options
from adaptive_verification.serving.default_pair import resolve_model
from adaptive_verification.settings import VerifierSettings
from adaptive_verification.verification.stage import VerifierStage


def load_verifier(settings: VerifierSettings) -> VerifierStage:
    """Loads the target.

    Raises:
        SettingsError: a device or type cannot be used.
        UnsupportedModel: packed attention would not compute what the target computes.
    """
    model = CausalModel.load(resolve_model(settings.target), model_options(settings))
    return VerifierStage(model, settings.idle_seconds)

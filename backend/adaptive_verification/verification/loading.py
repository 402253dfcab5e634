"""Makes the verifier that the settings name."""

from __future__ import annotations

from adaptive_verification.drafting.hidden_state_files import hidden_layers_of
from adaptive_verification.estimation.cost_model import VERIFY, VERIFY_CONTEXT, publish_curves
from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.loading import model_options
from adaptive_verification.forward.timing import sizes_up_to, time_context, time_forward
from adaptive_verification.serving import environment
from adaptive_verification.serving.default_pair import resolve_drafter, resolve_model
from adaptive_verification.settings import VerifierSettings
from adaptive_verification.verification.rejection_walk import warm_up
from adaptive_verification.verification.stage import VerifierStage

_LARGEST_TIMED_STEP_TOKENS = 256
"""Beyond it the cost goes on in a straight line: the processor is busy."""


def load_verifier(settings: VerifierSettings) -> VerifierStage:
    """Loads the target and publishes what its forward costs.

    Raises:
        SettingsError: a device or type cannot be used.
        UnsupportedModel: packed attention would not compute what the target computes.
    """
    options = model_options(settings)
    model = CausalModel.load(
        resolve_model(settings.target),
        options,
        hidden_layers=hidden_layers_of(resolve_drafter(settings.drafter, settings.target)),
    )
    by_tokens = time_forward(model, sizes_up_to(_LARGEST_TIMED_STEP_TOKENS), logits_everywhere=True)
    curves = {VERIFY: by_tokens, VERIFY_CONTEXT: time_context(model)}
    publish_curves(environment.state_directory(), "verifier", curves)
    if model.device.type == "cpu":
        warm_up(options.dtype)
    return VerifierStage(model, settings.idle_seconds, settings.prefix_caching)

"""From settings to where and how a model is loaded."""

from __future__ import annotations

from transformers import AutoConfig

from adaptive_verification.forward.causal_model import ModelOptions
from adaptive_verification.forward.placement import choose_device, choose_dtype
from adaptive_verification.settings import ModelSettings


def model_options(settings: ModelSettings) -> ModelOptions:
    """Resolves `auto` for device and type.

    Raises:
        SettingsError: the device is not there.
    """
    device = choose_device(settings.device)
    return ModelOptions(
        dtype=choose_dtype(settings.dtype, device),
        device=device,
        num_slots=settings.cache_slots,
        max_context_tokens=settings.max_context_tokens,
    )


def vocabulary_size(path: str) -> int:
    """Rows of the model's embedding: token ids are below it."""
    return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)

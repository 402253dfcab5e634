"""Makes the drafter that the settings name."""

from __future__ import annotations

from transformers import AutoTokenizer

from adaptive_verification.contract.step import Drafter
from adaptive_verification.drafting import hidden_state_files, proposal_loop
from adaptive_verification.drafting.hidden_state_kind import is_hidden_state_drafter
from adaptive_verification.drafting.hidden_state_model import HiddenStateModel
from adaptive_verification.drafting.lookup_stage import LookupDrafter
from adaptive_verification.drafting.stage import CausalDrafter
from adaptive_verification.errors import SettingsError, UnsupportedModel
from adaptive_verification.estimation.cost_model import DRAFT_EXTEND, DRAFT_PREFILL, publish_curves
from adaptive_verification.estimation.features import DRAFT_FEATURES
from adaptive_verification.forward.causal_model import CausalModel
from adaptive_verification.forward.loading import model_options, vocabulary_size
from adaptive_verification.forward.timing import sizes_up_to, time_forward
from adaptive_verification.serving import environment
from adaptive_verification.serving.default_pair import resolve_drafter, resolve_model
from adaptive_verification.settings import LOOKUP, DrafterSettings

_FIRST_LAYERS = "first-layers:"
_TIMED_CONTEXT_TOKENS = 128
"""An ordinary chat turn. Longer contexts show in the live times."""


def load_drafter(settings: DrafterSettings) -> Drafter:
    """Loads the drafter, checks that it speaks the target's tokens, and publishes what its forwards cost.

    Raises:
        SettingsError: `drafter` or a device cannot be understood, or nothing would draft.
        UnsupportedModel: the drafter cannot be used, or not with this target.
    """
    target = resolve_model(settings.target)
    drafter = resolve_drafter(settings.drafter, settings.target)
    if settings.lookup_min_match == 0:
        if drafter == LOOKUP:
            raise SettingsError(f"drafter={LOOKUP!r} with lookup_min_match=0 drafts nothing; it must be at least 1")
        return _load_model(settings, drafter, target)
    return LookupDrafter(
        None if drafter == LOOKUP else _load_model(settings, drafter, target),
        min_match=settings.lookup_min_match,
        num_slots=settings.cache_slots,
        capacity=settings.max_context_tokens,
        idle_seconds=settings.idle_seconds,
        vocab_size=vocabulary_size(target),
        num_features=len(DRAFT_FEATURES) if settings.draft_features == "all" else 0,
    )


def _load_model(settings: DrafterSettings, drafter: str, target: str) -> CausalDrafter:
    options = model_options(settings)
    model: CausalModel | HiddenStateModel
    if drafter.startswith(_FIRST_LAYERS):
        count = drafter.removeprefix(_FIRST_LAYERS)
        if not count.isdecimal():
            raise SettingsError(f"drafter={drafter!r}: after {_FIRST_LAYERS} comes a number of layers")
        model = CausalModel.load(target, options, num_layers=int(count))
    elif is_hidden_state_drafter(drafter):
        model = hidden_state_files.load(drafter, target, options)
    else:
        refuse_other_tokenizer(target=target, drafter=drafter)
        model = CausalModel.load(drafter, options)
    if model.device.type == "cpu":
        proposal_loop.warm_up(options.dtype)
    publish_curves(
        environment.state_directory(),
        "drafter",
        {
            DRAFT_PREFILL: time_forward(
                model,
                sizes_up_to(settings.max_catch_up_tokens),
                logits_everywhere=False,
                context_tokens=_TIMED_CONTEXT_TOKENS,
            ),
            DRAFT_EXTEND: time_forward(
                model,
                sizes_up_to(min(model.num_slots, 64)),
                logits_everywhere=True,
                context_tokens=_TIMED_CONTEXT_TOKENS,
            ),
        },
    )
    return CausalDrafter(
        model,
        target_vocab_size=vocabulary_size(target),
        idle_seconds=settings.idle_seconds,
        draft_top_k=settings.draft_top_k,
        max_catch_up_tokens=settings.max_catch_up_tokens,
        with_features=settings.draft_features == "all",
        prefix_caching=settings.prefix_caching,
    )


def refuse_other_tokenizer(*, target: str, drafter: str) -> None:
    """Refuses a drafter whose token ids do not mean what the target's mean.

    Raises:
        UnsupportedModel: naming the first difference.
    """
    target_ids = AutoTokenizer.from_pretrained(target).get_vocab()
    drafter_ids = AutoTokenizer.from_pretrained(drafter).get_vocab()
    if target_ids != drafter_ids:
        token = min(token for token, _ in target_ids.items() ^ drafter_ids.items())
        raise UnsupportedModel(
            f"drafter {drafter} and target {target} have different tokenizers: token {token!r} is "
            f"{drafter_ids.get(token, 'unknown')} to the drafter and {target_ids.get(token, 'unknown')} to the target"
        )
    known = vocabulary_size(drafter)
    if known <= max(target_ids.values()):
        raise UnsupportedModel(f"drafter {drafter} has {known} token ids, too few for the target's tokenizer")

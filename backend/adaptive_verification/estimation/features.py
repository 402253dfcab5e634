"""What a draft's acceptance is predicted from: one number per draft, made from the drafter's distribution.

A lossless feature of draft i depends on the tokens before it only. A lossy one looks at the drawn token itself:
trimming by it biases the output, so it is for studies and never for serving.

This module knows logits and log-odds, nothing of fits, budgets or requests. Shapes: `[...]` any, the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptive_verification.errors import SettingsError

MAX_LOG_ODDS = 40.0
"""Features are clamped to this many units on both sides."""
_FAR_BELOW = 1e30
"""Stands for an infinite logit: no probability beside any other, and still finite when subtracted."""


def scaled_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits `[..., vocabulary]` divided by the temperature `[...]`; unscaled where the temperature is 0."""
    return logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)


def log_odds_of(logits: Tensor, token: Tensor) -> Tensor:
    """Log-odds of one token against all others, clamped.

    The sum of the others is taken without the token, so nothing cancels: `log(total - 1)` of float32 exponentials would
    lose it above log-odds of about 16. Equal logits elsewhere stay in the sum.

    Args:
        logits: `[..., vocabulary]`, any floating type; NaN counts as no probability.
        token: `[...]` ids.

    Returns:
        `[...]`, finite, within +-MAX_LOG_ODDS.
    """
    logits = _finite(logits)
    chosen = token.long().unsqueeze(-1)
    others = logits.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    return _clamped(logits.gather(-1, chosen).squeeze(-1) - others)


def logit_q_max(logits: Tensor) -> Tensor:
    """Log-odds of the most likely token, `[...]` from `[..., vocabulary]`."""
    return log_odds_of(logits, _finite(logits).argmax(-1))


def clean_log_odds(log_odds: Tensor) -> Tensor:
    """Log-odds as a drafter sends them, made finite and clamped; NaN becomes 0, which says nothing either way."""
    return torch.nan_to_num(log_odds, nan=0.0).clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)


@dataclass(frozen=True)
class Feature:
    """One way of looking at a draft's distribution."""

    name: str
    lossless: bool
    fitted: bool
    """False: the feature is itself the log-odds of acceptance, and no fit is applied."""
    from_logits: Callable[[Tensor, Tensor], Tensor] | None
    """(temperature-scaled logits `[..., vocabulary]`, drawn tokens `[...]`) -> feature `[...]`."""
    from_log_odds: Callable[[Tensor], Tensor] | None
    """Clean log-odds of the most likely token `[...]` -> feature `[...]`; None where they do not determine it."""


def _log_q(log_odds: Tensor) -> Tensor:
    return F.logsigmoid(log_odds)


def _gumbel_quantile(log_odds: Tensor) -> Tensor:
    """-log(-log q): the scale on which Gumbel noise adds."""
    return _clamped(-torch.log(F.softplus(-log_odds)))


def _unchanged(log_odds: Tensor) -> Tensor:
    return log_odds


def _negative_entropy(logits: Tensor, drawn: Tensor) -> Tensor:
    """Negative, so that more means likelier to be accepted, as the fit's non-negative slope needs."""
    log_probs = torch.log_softmax(_finite(logits), -1)
    return (log_probs.exp() * log_probs).sum(-1)


def _top_two_margin(logits: Tensor, drawn: Tensor) -> Tensor:
    if logits.shape[-1] == 1:
        return torch.full_like(logits[..., 0], MAX_LOG_ODDS)
    first, second = _finite(logits).topk(2, -1).values.unbind(-1)
    return _clamped(first - second)


def _of_most_likely(name: str, from_log_odds: Callable[[Tensor], Tensor], *, fitted: bool = True) -> Feature:
    return Feature(name, True, fitted, lambda logits, drawn: from_log_odds(logit_q_max(logits)), from_log_odds)


def _of_drawn(name: str, from_log_odds: Callable[[Tensor], Tensor]) -> Feature:
    return Feature(name, False, True, lambda logits, drawn: from_log_odds(log_odds_of(logits, drawn)), None)


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        _of_most_likely("logit_q_max", _unchanged),
        _of_most_likely("gumbel_q_max", _gumbel_quantile),
        Feature("entropy", True, True, _negative_entropy, None),
        Feature("top_two_margin", True, True, _top_two_margin, None),
        _of_most_likely("log_q_max", _log_q),
        _of_most_likely("q_max_unfitted", _unchanged, fitted=False),
        Feature("drafter_score", True, False, None, _unchanged),
        _of_drawn("logit_q_drawn", _unchanged),
        _of_drawn("gumbel_q_drawn", _gumbel_quantile),
    )
}
"""By name. `drafter_score`: a drafter's own confidence head sends its log-odds in the place of logit(q_max)."""


def serving_feature(name: str) -> Feature:
    """The feature of that name, if trimming by it is lossless and a `Draft` carries what it needs.

    Raises:
        SettingsError: it is not.
    """
    allowed = ", ".join(key for key, known in FEATURES.items() if known.lossless and known.from_log_odds)
    feature = FEATURES.get(name)
    if feature is None:
        raise SettingsError(f"feature={name!r} is unknown; serving allows: {allowed}")
    if not feature.lossless:
        raise SettingsError(
            f"feature={name!r} looks at the drawn token, so trimming by it biases the output; serving allows: {allowed}"
        )
    if feature.from_log_odds is None:
        raise SettingsError(f"feature={name!r} needs raw logits, which drafts do not carry; serving allows: {allowed}")
    return feature


def _finite(logits: Tensor) -> Tensor:
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return torch.nan_to_num(logits, nan=-_FAR_BELOW, posinf=_FAR_BELOW, neginf=-_FAR_BELOW)


def _clamped(values: Tensor) -> Tensor:
    return values.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)

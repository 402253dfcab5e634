"""What a draft's acceptance is predicted from: one number per draft, made from the drafter's distribution.

Two halves. The drafter measures each distribution on its own device: the log-odds of the most likely token, which every
draft carries, and where it is asked for them `DRAFT_FEATURES`. The estimator makes its feature of these numbers.

A lossless feature of draft i depends on the tokens before it only. A lossy one looks at the drawn token itself:
trimming by it biases the output, so it is for studies and never for serving.

This module knows logits and what is measured of them, nothing of fits, budgets or requests. Shapes: `[...]` any, the
same for all; `[..., vocabulary]` logits are already divided by the temperature (see `sampling.truncation.scale`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adaptive_verification.compiled import compiled
from adaptive_verification.errors import SettingsError

MAX_LOG_ODDS = 40.0
"""Features are clamped to this many units on both sides."""
_FAR_BELOW = 1e30
"""Stands for an infinite logit: no probability beside any other, and still finite when subtracted."""

NEGATIVE_ENTROPY, TOP_TWO_MARGIN, DRAWN_LOG_ODDS = range(3)
DRAFT_FEATURES = ("negative_entropy", "top_two_margin", "drawn_log_odds")
"""What `draft_features` measures, in this order: the entropy in nats, negative, so that more means likelier accepted
(as the fit's non-negative slope needs); the difference of the two largest logits; the log-odds of the drawn token."""


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


def draft_features(logits: Tensor, drawn: Tensor) -> Tensor:
    """`DRAFT_FEATURES` of logits `[..., vocabulary]` and the tokens drawn `[...]`: `[..., 3]`, finite."""
    logits = _finite(logits)
    return torch.stack([_negative_entropy(logits), _top_two_margin(logits), log_odds_of(logits, drawn)], -1)


@compiled
def clean(measured: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a drafter sends, clamped; NaN becomes 0, which of log-odds says nothing either way."""
    cleaned = np.zeros_like(measured)
    for place, value in np.ndenumerate(measured):
        if not np.isnan(value):
            cleaned[place] = min(max(value, -MAX_LOG_ODDS), MAX_LOG_ODDS)
    return cleaned


@dataclass(frozen=True)
class Feature:
    """One way of looking at a draft's distribution: a function of one of the numbers that the drafter measures."""

    name: str
    source: int | None
    """Which of `DRAFT_FEATURES`; None: the log-odds of the most likely token."""
    of_source: Callable[[Tensor], Tensor]
    fitted: bool = True
    """False: the feature is itself the log-odds of acceptance, and no fit is applied."""

    @property
    def lossless(self) -> bool:
        return self.source != DRAWN_LOG_ODDS

    def __call__(self, log_odds: Tensor, draft_features: Tensor | None) -> Tensor:
        """The feature `[...]`, from clean log-odds of the most likely token `[...]` and `DRAFT_FEATURES` `[..., 3]`.

        The second may be None where the feature does not need it.
        """
        if self.source is None:
            return self.of_source(log_odds)
        assert draft_features is not None  # whoever uses such a feature has checked that the drafter measures it
        return self.of_source(draft_features[..., self.source])


def _log_q(log_odds: Tensor) -> Tensor:
    return F.logsigmoid(log_odds)


def _gumbel_quantile(log_odds: Tensor) -> Tensor:
    """-log(-log q): the scale on which Gumbel noise adds."""
    return _clamped(-torch.log(F.softplus(-log_odds)))


def _unchanged(log_odds: Tensor) -> Tensor:
    return log_odds


def _negative_entropy(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, -1)
    return (log_probs.exp() * log_probs).sum(-1)


def _top_two_margin(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 1:
        return torch.full_like(logits[..., 0], MAX_LOG_ODDS)
    first, second = logits.topk(2, -1).values.unbind(-1)
    return _clamped(first - second)


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("logit_q_max", None, _unchanged),
        Feature("gumbel_q_max", None, _gumbel_quantile),
        Feature("entropy", NEGATIVE_ENTROPY, _unchanged),
        Feature("top_two_margin", TOP_TWO_MARGIN, _unchanged),
        Feature("log_q_max", None, _log_q),
        Feature("q_max_unfitted", None, _unchanged, fitted=False),
        Feature("drafter_score", None, _unchanged, fitted=False),
        Feature("logit_q_drawn", DRAWN_LOG_ODDS, _unchanged),
        Feature("gumbel_q_drawn", DRAWN_LOG_ODDS, _gumbel_quantile),
    )
}
"""By name. `drafter_score`: a drafter's own confidence head sends its log-odds in the place of logit(q_max)."""


def serving_feature(name: str) -> Feature:
    """The feature of that name, if trimming by it is lossless.

    Raises:
        SettingsError: it is not.
    """
    allowed = ", ".join(key for key, known in FEATURES.items() if known.lossless)
    feature = FEATURES.get(name)
    if feature is None:
        raise SettingsError(f"feature={name!r} is unknown; serving allows: {allowed}")
    if not feature.lossless:
        raise SettingsError(
            f"feature={name!r} looks at the drawn token, so trimming by it biases the output; serving allows: {allowed}"
        )
    return feature


def _finite(logits: Tensor) -> Tensor:
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return torch.nan_to_num(logits, nan=-_FAR_BELOW, posinf=_FAR_BELOW, neginf=-_FAR_BELOW)


def _clamped(values: Tensor) -> Tensor:
    return values.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adaptive_verification.errors import SettingsError
from adaptive_verification.estimation.features import (
    FEATURES,
    MAX_LOG_ODDS,
    Feature,
    clean,
    draft_features,
    log_odds_of,
    logit_q_max,
    serving_feature,
)
from adaptive_verification.sampling.truncation import scale


def test_log_odds_equal_the_probabilities_where_those_are_exact() -> None:
    logits = torch.randn(200, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    q = logits.softmax(-1).amax(-1)
    torch.testing.assert_close(logit_q_max(logits), (q / (1 - q)).log(), atol=1e-9, rtol=0)


def test_float32_keeps_log_odds_far_above_16() -> None:
    gaps = torch.linspace(10, 39, 100)
    logits = torch.stack([gaps, torch.zeros_like(gaps), torch.zeros_like(gaps)], -1)
    torch.testing.assert_close(logit_q_max(logits), gaps - math.log(2), atol=1e-5, rtol=0)


def test_of_two_equally_likely_top_tokens_one_stays_in_the_sum() -> None:
    assert logit_q_max(torch.tensor([3.0, 3.0])).item() == pytest.approx(0.0, abs=1e-6)
    assert logit_q_max(torch.tensor([[3.0, 3.0, 3.0]])).item() == pytest.approx(-math.log(2), abs=1e-6)


def test_log_odds_are_clamped_on_both_sides() -> None:
    assert logit_q_max(torch.tensor([500.0, 0.0])).item() == MAX_LOG_ODDS
    assert log_odds_of(torch.tensor([500.0, 0.0]), torch.tensor(1)).item() == -MAX_LOG_ODDS
    assert logit_q_max(torch.tensor([1.0])).item() == MAX_LOG_ODDS


def test_logits_are_scaled_by_the_temperature_and_left_alone_at_zero() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    scaled = scale(logits, torch.tensor([0.5, 0.0]))
    assert logit_q_max(scaled).tolist() == pytest.approx([4.0, 2.0])


def from_logits(feature: Feature, logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The drafter's half and the estimator's, one after the other."""
    return feature(logit_q_max(logits), draft_features(logits, drawn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_every_feature_is_finite_whatever_the_logits(feature: Feature, dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    rows = [[nan] * 4, [inf, 0, 0, 0], [inf] * 4, [-inf] * 4, [-inf, 0, -inf, -inf], [nan, 1, 2, inf], [0, 0, 0, 0]]
    logits, drawn = torch.tensor(rows, dtype=dtype), torch.tensor([0, 1, 2, 3, 1, 0, 0])
    values = from_logits(feature, logits, drawn)
    assert values.isfinite().all(), values
    assert (values.abs() <= max(MAX_LOG_ODDS, math.log(4))).all()


def test_what_a_drafter_sends_is_made_finite_and_clamped() -> None:
    sent = np.array([math.nan, math.inf, -math.inf, 1e9, 3.0], dtype=np.float32)
    assert clean(sent).tolist() == [0.0, 40.0, -40.0, 40.0, 3.0]


def test_features_of_the_most_likely_token_follow_from_its_log_odds() -> None:
    logits = torch.randn(100, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    log_odds, q = logit_q_max(logits), logits.softmax(-1).amax(-1)
    expected = {
        "logit_q_max": (q / (1 - q)).log(),
        "gumbel_q_max": -(-q.log()).log(),
        "log_q_max": q.log(),
        "q_max_unfitted": (q / (1 - q)).log(),
    }
    for name, values in expected.items():
        torch.testing.assert_close(FEATURES[name](log_odds, None), values, atol=1e-9, rtol=1e-9)


def test_features_of_the_whole_distribution_and_of_the_drawn_token_equal_their_definitions() -> None:
    logits = torch.randn(100, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3
    drawn = torch.arange(100) % 30
    probs, q = logits.softmax(-1), logits.softmax(-1).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    first, second = logits.topk(2, -1).values.unbind(-1)
    expected = {
        "entropy": (probs * probs.log()).sum(-1),
        "top_two_margin": first - second,
        "logit_q_drawn": (q / (1 - q)).log(),
        "gumbel_q_drawn": -(-q.log()).log(),
    }
    for name, values in expected.items():
        torch.testing.assert_close(from_logits(FEATURES[name], logits, drawn), values, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("logit_q_drawn", "looks at the drawn token, so trimming by it biases the output"),
        ("gumbel_q_drawn", "looks at the drawn token"),
        ("no such feature", "unknown"),
    ],
)
def test_serving_refuses_features_that_are_lossy_or_unknown(name: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        serving_feature(name)


def test_exactly_the_features_of_the_drawn_token_are_lossy() -> None:
    assert {name for name, feature in FEATURES.items() if not feature.lossless} == {"logit_q_drawn", "gumbel_q_drawn"}

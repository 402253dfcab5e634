from __future__ import annotations

import pytest

from adaptive_verification.estimation.time_price import TimePrice


def test_at_first_a_millisecond_must_bring_what_it_brings_without_speculation() -> None:
    assert TimePrice().per_ms(rows=8, plain_ms=40.0) == pytest.approx(8 / 40)


def test_the_price_is_the_ratio_of_the_sums_and_goes_with_the_rows() -> None:
    price = TimePrice()
    for _ in range(500):
        price.add(rows=2, plain_ms=10.0, tokens=6.0, milliseconds=20.0)  # 1.5 times as fast
        price.add(rows=2, plain_ms=10.0, tokens=2.0, milliseconds=10.0)
    assert price.speed_up == pytest.approx((3 + 1) / (2 + 1), rel=0.02)
    assert price.per_ms(rows=32, plain_ms=80.0) == pytest.approx(price.speed_up * 32 / 80)


def test_steps_that_sample_nothing_do_not_count_and_old_ones_are_forgotten() -> None:
    price = TimePrice()
    price.add(rows=0, plain_ms=10.0, tokens=0.0, milliseconds=50.0)
    assert price.speed_up == 1.0
    for tokens in (4.0, 1.0):
        for _ in range(400):
            price.add(rows=1, plain_ms=10.0, tokens=tokens, milliseconds=10.0)
        assert price.speed_up == pytest.approx(tokens, rel=0.01)


def test_deciding_at_this_price_reaches_the_best_ratio_of_the_sums() -> None:
    """Two kinds of steps in turn: one may add a token in its cost, the other four in theirs."""
    choices = [[(1.0, 10.0), (2.0, 17.0)], [(1.0, 10.0), (5.0, 20.0)]]
    best = max((a[0] + b[0]) / (a[1] + b[1]) for a in choices[0] for b in choices[1])
    price = TimePrice()
    for step in range(400):
        tokens, milliseconds = max(choices[step % 2], key=lambda choice: choice[0] - price.per_ms(1, 10.0) * choice[1])
        price.add(1, 10.0, tokens, milliseconds)
    assert price.per_ms(1, 10.0) == pytest.approx(best, rel=0.02)
    greedy = sum(max(kind, key=lambda choice: choice[0] / choice[1])[0] for kind in choices) / 37
    assert greedy < best

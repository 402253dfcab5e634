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
    assert price.speed_up(2) == pytest.approx((3 + 1) / (2 + 1), rel=0.02)
    assert price.per_ms(rows=2, plain_ms=8.0) == pytest.approx(price.speed_up(2) * 2 / 8)


def test_what_many_rows_gain_is_learned_from_steps_of_about_as_many() -> None:
    price = TimePrice()
    for _ in range(500):
        price.add(rows=1, plain_ms=10.0, tokens=2.0, milliseconds=10.0)
        price.add(rows=6, plain_ms=10.0, tokens=9.0, milliseconds=10.0)
    assert price.speed_up(1) == pytest.approx(2.0, rel=0.01)
    assert price.speed_up(5) == price.speed_up(8) == pytest.approx(1.5, rel=0.01)
    assert [price.speed_up(rows) for rows in (2, 4, 9, 64)] == [1.0] * 4
    for _ in range(5):  # a few steps of a new number of rows say more than many of another
        price.add(rows=64, plain_ms=10.0, tokens=64 * 1.2, milliseconds=10.0)
    assert price.speed_up(64) == pytest.approx(1 + 0.2 * 5 / 6, rel=0.01)


def test_steps_that_sample_nothing_do_not_count_and_old_ones_are_forgotten() -> None:
    price = TimePrice()
    price.add(rows=0, plain_ms=10.0, tokens=0.0, milliseconds=50.0)
    assert price.speed_up(1) == 1.0
    for tokens in (4.0, 1.0):
        for _ in range(400):
            price.add(rows=1, plain_ms=10.0, tokens=tokens, milliseconds=10.0)
        assert price.speed_up(1) == pytest.approx(tokens, rel=0.01)


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

"""Learning rates, and the sharing out of device time."""

from __future__ import annotations

from math import cos, pi
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.jobs import Schedule, TrainSpec
from plait.engine.ledger import nanoseconds, share
from plait.engine.steps import learning_rate, warmup_steps


def rates(steps: int, **options: object) -> list[float]:
    train = TrainSpec(lr=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(train, step, steps) for step in range(1, steps + 1)]


def test_constant_linear_and_cosine_without_warmup() -> None:
    assert rates(4) == [1.0] * 4
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    expected = [0.5 * (1 + cos(pi * done / 4)) for done in range(4)]
    assert rates(4, schedule="cosine") == pytest.approx(expected)


def test_warmup_rises_to_the_peak_and_the_decay_starts_there() -> None:
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(8, warmup_steps=0.25)[:3] == [0.5, 1.0, 1.0]


def test_a_warmup_longer_than_the_budget_fills_it() -> None:
    assert warmup_steps(TrainSpec(warmup_steps=10), 4) == 4
    assert rates(4, warmup_steps=10, schedule="cosine") == [0.25, 0.5, 0.75, 1.0]


@given(
    steps=st.integers(1, 200),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 50).map(float)),
    schedule=st.sampled_from(get_args(Schedule)),
)
def test_rates_are_above_zero_and_at_most_the_peak(steps: int, warmup: float, schedule: str) -> None:
    found = rates(steps, schedule=schedule, warmup_steps=warmup)
    assert all(0.0 < rate <= 1.0 for rate in found)


@given(total=st.integers(0, 10**15), weights=st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_shares_add_up_exactly_and_are_within_one_of_their_proportion(total: int, weights: list[int]) -> None:
    shares = share(total, weights)
    assert sum(shares) == total
    even = weights if sum(weights) else [1] * len(weights)
    for part, weight in zip(shares, even, strict=True):
        assert abs(part * sum(even) - total * weight) < sum(even)


def test_shares_of_nothing_or_of_negative_weights_are_refused() -> None:
    for weights in ([], [3, -1]):
        with pytest.raises(ValueError, match="weights"):
            share(10, weights)


def test_seconds_become_whole_nanoseconds() -> None:
    assert nanoseconds(1.25) == 1_250_000_000
    assert nanoseconds(2.6e-9) == 3

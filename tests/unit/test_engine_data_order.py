"""The order of a job's data: epochs, budgets, resumption and independence of everything else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import DataError
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.samples import Sample, Share, Split
from plait.engine.steps import DataOrder, block_quotas, permutation, training_batch, validation_batch

GOLDEN = (
    [3, 1, 2, 9, 5, 6, 8, 4, 7, 0],
    [2, 7, 5, 6, 8, 1, 3, 4, 9, 0],
    [6, 2, 1, 7, 0, 4, 8, 9, 5, 3],
)
GOLDEN_MIXTURE = [3, 1, 2, 14, 8, 4, 0, 2, 5, 2, 6, 4, 0, 17, 3, 0, 7, 1]
BUDGETS = st.one_of(
    st.integers(1, 30).map(lambda steps: {"steps": steps, "epochs": None}),
    st.floats(0.1, 4.0).map(lambda epochs: {"steps": None, "epochs": epochs}),
)


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    budget=BUDGETS,
)
def test_every_epoch_is_a_permutation_and_the_budget_is_met(
    samples: int, batch_size: int, accumulation: int, seed: int, budget: dict[str, float]
) -> None:
    train = TrainSpec(batch_size=batch_size, accumulation=accumulation, seed=seed, **budget)  # type: ignore[arg-type]
    order = DataOrder.of(train, samples)
    batches = [order.at(step) for step in range(1, order.steps + 1)]
    assert all(len(chosen) == train.global_batch for chosen, _ in batches[:-1])
    assert 1 <= len(batches[-1][0]) <= train.global_batch
    drawn = [pair for chosen, draws in batches for pair in zip(chosen, draws, strict=True)]
    if train.steps is not None:
        assert len(drawn) == train.steps * train.global_batch
    else:
        assert train.epochs is not None
        assert len(drawn) == max(1, round(train.epochs * samples))
    assert len(set(drawn)) == len(drawn), "the same draw of a sample came twice"
    assert [draw for _, draw in drawn] == sorted(draw for _, draw in drawn)
    for epoch in range(len(drawn) // samples):
        assert sorted(sample for sample, draw in drawn if draw == epoch) == list(range(samples))


def test_any_step_is_reached_without_those_before_it() -> None:
    order = DataOrder.of(TrainSpec(steps=50, batch_size=3, seed=5), 7)
    walked = [order.at(step) for step in range(1, 51)]
    permutation.cache_clear()
    assert order.at(37) == walked[36]
    with pytest.raises(IndexError):
        order.at(51)
    with pytest.raises(IndexError):
        order.at(0)


def test_the_permutation_is_fixed_for_ever() -> None:
    """A change here would make every saved job go on with other data."""
    assert permutation(0, 0, 10).tolist() == GOLDEN[0]
    assert permutation(1, 0, 10).tolist() == GOLDEN[1]
    assert permutation(0, 1, 10).tolist() == GOLDEN[2]


def test_seeds_and_epochs_give_other_orders_and_all_places_are_as_likely() -> None:
    firsts = Counter(int(permutation(seed, 0, 8)[0]) for seed in range(4000))
    counts = np.array([firsts[place] for place in range(8)])
    # Chi-square with 7 degrees of freedom: above 24.3 in one of a thousand fair draws; the seeds are fixed.
    assert ((counts - 500) ** 2 / 500).sum() < 24.3


def test_loss_weight_counts_the_labels_of_the_whole_global_batch() -> None:
    split = Split.of(
        [
            Sample(
                np.arange(4, dtype=np.int32), np.array([True, True, False, True])
            ),  # 2: the first never counts
            Sample(np.arange(3, dtype=np.int32), np.array([False, False, True])),
            Sample(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.bool_)),
        ]
    )
    job = JobSpec("one", train=TrainSpec(batch_size=3, steps=1))
    batch = training_batch(job, DataOrder.of(job.train, 3), split, 1)
    assert sorted(batch.samples) == [0, 1, 2]
    assert batch.loss_weight == pytest.approx(1 / 3)
    assert batch.lengths == tuple([4, 3, 5][sample] for sample in batch.samples)
    whole = validation_batch(job, split, 7)
    assert (whole.samples, whole.step, whole.split) == ((0, 1, 2), 7, "validation")


def test_a_batch_without_labels_weighs_nothing() -> None:
    split = Split.of([Sample(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.bool_))])
    assert validation_batch(JobSpec("one"), split, 0).loss_weight == 0.0


def test_a_step_that_repeats_few_samples_a_million_times_is_refused() -> None:
    with pytest.raises(DataError, match="20 samples to train on"):
        DataOrder.of(TrainSpec(batch_size=1_000_000), 20)
    assert DataOrder.of(TrainSpec(steps=1, batch_size=64, accumulation=4), 20).steps == 1
    assert DataOrder.of(TrainSpec(steps=1, batch_size=20_000), 20_000).steps == 1


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(DataError, match="at least one training sample"):
        DataOrder.of(TrainSpec(), 0)


SHARES = (Share(5, 3.0), Share(4, 1.0), Share(9, 0.5))


def test_every_block_of_a_mixture_has_the_shares_and_every_source_its_own_epochs():
    order = DataOrder.of(TrainSpec(steps=60, batch_size=3, seed=4), 18, SHARES)
    drawn = [pair for step in range(1, 61) for pair in zip(*order.at(step), strict=True)]
    first = 0
    for share, quota in zip(SHARES, (6, 2, 1), strict=True):
        own = [(sample, draw) for sample, draw in drawn if first <= sample < first + share.samples]
        for start in range(0, len(drawn), 9):
            block = drawn[start : start + 9]
            assert sum(first <= sample < first + share.samples for sample, _ in block) == quota
        assert sorted(draw for _, draw in own) == [index // share.samples for index in range(len(own))]
        assert len(set(own)) == len(own)
        first += share.samples
    assert (
        len({tuple(sample // 5 for sample, _ in drawn[start : start + 9]) for start in range(0, 180, 9)}) > 5
    )


def test_a_mixture_s_order_depends_on_the_seed_and_not_on_batches_or_budget():
    def stream(**train):
        order = DataOrder.of(TrainSpec(**train), 18, SHARES)
        return [sample for step in range(1, order.steps + 1) for sample in order.at(step)[0]]

    assert (
        stream(steps=30, batch_size=2)
        == stream(steps=10, batch_size=6)
        == stream(steps=90, batch_size=1)[:60]
    )
    assert stream(steps=10, batch_size=6) != stream(steps=10, batch_size=6, seed=1)
    assert len(stream(epochs=2, batch_size=4)) == 36
    # This order is part of what a search that resumes depends on.
    assert stream(steps=2, batch_size=9) == GOLDEN_MIXTURE


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ((3.0, 1.0), (3, 1)),
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((1.0, 2.0), (1, 2)),
        ((5.0,), (1,)),
        ((0.333, 0.667), (333, 667)),
        ((1.0, 2.5001), (143, 357)),
        ((1e-9, 1.0), (1, 1000)),
        ((1e300, 1e300), (1, 1)),
    ],
)
def test_the_quotas_of_a_block_have_the_ratio_of_the_weights(weights, quotas):
    assert block_quotas(weights) == quotas

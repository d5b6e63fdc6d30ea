"""Who rests: subset sums against every subset, nobody thrice in a row, fewer microbatches for the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import ConfigError
from plait.core.settings import PlannerSettings, RunSettings, SearchSettings
from plait.planner.packing import first_fit_decreasing
from plait.planner.resting import WORTH, Choice, NextBatch, choose_resting, resting_sets

CAPACITY = 100
Bins = Sequence[object]


def by_volume(tokens: Sequence[int]) -> Callable[[Sequence[int]], Bins]:
    """A packer of samples as fine as sand."""
    return lambda places: range(-(-sum(tokens[place] for place in places) // CAPACITY))


def chosen(
    tokens: Sequence[int],
    *,
    in_a_row: Sequence[int] = (),
    priority: Sequence[int] = (),
    min_fill: float = 0.95,
) -> Choice[Bins]:
    batches = [
        NextBatch(
            count,
            priority[at] if priority else 0,
            in_a_row[at] if in_a_row else 1,
        )
        for at, count in enumerate(tokens)
    ]
    return choose_resting(batches, by_volume(tokens), capacity=CAPACITY, min_fill=min_fill)


@pytest.mark.parametrize(
    ("tokens", "resting"),
    [
        pytest.param([97], (), id="alone"),
        pytest.param([20, 20], (), id="less than one microbatch"),
        pytest.param([95, 96], (), id="full enough"),
        pytest.param([45, 50, 45], (2,), id="the last of those that have taken part as long"),
        pytest.param([5] * 26, (20, 21, 22, 23, 24, 25), id="as many as it takes"),
        pytest.param([60, 60, 60, 60], (3,), id="as full as can be"),
        pytest.param([60, 60], (), id="none is fuller"),
        pytest.param([75, 76], (), id="gains too little"),
    ],
)
def test_who_rests(tokens: list[int], resting: tuple[int, ...]) -> None:
    assert chosen(tokens).resting == resting
    assert chosen(tokens, min_fill=0).resting == ()


def test_whoever_has_taken_part_the_longest_rests_and_nobody_three_times_in_a_row() -> None:
    assert chosen([48, 49, 48], in_a_row=[4, 9, 3]).resting == (1,)
    assert chosen([48, 49, 48], in_a_row=[4, 0, 3]).resting == (0,)
    assert chosen([48, 49, 48], in_a_row=[0, -1, -1]).resting == (0,)
    assert chosen([48, 49, 48], in_a_row=[-1, -1, -1]).resting == ()


def test_only_jobs_of_the_lowest_priority_rest() -> None:
    assert chosen([45, 50, 45], priority=[2, 1, 2]).resting == (1,)
    assert chosen([45, 50, 45], priority=[2, 1, 2], in_a_row=[1, -1, 1]).resting == ()


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"planner\.min_fill=1\.5\n.*\[0, 1\]"):
        PlannerSettings(min_fill=1.5)


def test_nobody_rests_in_a_search_without_a_queue() -> None:
    for trials, wanted in ((8, 0.0), (9, 0.9)):
        search = SearchSettings(trials=trials, parallel=8)
        run = RunSettings(planner=PlannerSettings(max_jobs=3, min_fill=0.9), search=search)
        assert run.planner_of_search == PlannerSettings(max_jobs=3, min_fill=wanted)


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(1, 230), min_size=1, max_size=8),
    min_fill=st.sampled_from([0.5, 0.9, 0.95, 1.0]),
    data=st.data(),
)
def test_what_is_wanted_is_reached_whenever_a_set_of_all_reaches_it(
    tokens: list[int], min_fill: float, data: st.DataObject
) -> None:
    """Against every subset that leaves at least half of the microbatches."""
    in_a_row = data.draw(st.lists(st.integers(-1, 3), min_size=len(tokens), max_size=len(tokens)))
    found = chosen(tokens, in_a_row=in_a_row, min_fill=min_fill)
    assert all(in_a_row[place] >= 0 for place in found.resting)

    def fill(resting: Sequence[int]) -> float:
        left = sum(tokens) - sum(tokens[place] for place in resting)
        return left / (-(-left // CAPACITY) * CAPACITY)

    assert found.fill == fill(found.resting)
    together = -(-sum(tokens) // CAPACITY)
    may = [place for place, count in enumerate(in_a_row) if count >= 0]
    sets = [
        resting
        for size in range(min(len(may), len(tokens) - 1) + 1)
        for resting in combinations(may, size)
        if -(-(sum(tokens) - sum(tokens[place] for place in resting)) // CAPACITY) >= max(1, together // 2)
    ]
    best = max(map(fill, sets))
    assert (found.fill >= min_fill) == (best >= min_fill)
    if best < min_fill:
        assert found.fill >= best - WORTH
    if found.resting:
        assert found.fill > fill(())
        assert len(found.packed) < together


@settings(max_examples=80)
@given(
    jobs=st.lists(
        st.tuples(
            st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 2), st.integers(1, 4)
        ),
        min_size=1,
        max_size=9,
    ),
    min_fill=st.sampled_from([0.5, 0.95, 1.0]),
)
def test_each_job_takes_part_in_every_third_iteration_at_least(
    jobs: list[tuple[list[int], int, int]], min_fill: float
) -> None:
    """Really packed; each job's batches are slices of its samples, joined in turn."""
    steps, in_a_row = [0] * len(jobs), [1] * len(jobs)
    for iteration in range(1, 13):
        lengths = [
            [own[(steps[at] * size + place) % len(own)] for place in range(size)]
            for at, (own, _, size) in enumerate(jobs)
        ]
        batches = [
            NextBatch(sum(lengths[at]), priority, in_a_row[at]) for at, (_, priority, _) in enumerate(jobs)
        ]
        found = choose_resting(
            batches,
            lambda places, lengths=lengths: first_fit_decreasing(  # type: ignore[misc]
                [lengths[place] for place in places], capacity=60
            ),
            capacity=60,
            min_fill=min_fill,
        )
        trains = [at for at in range(len(jobs)) if at not in found.resting]
        assert trains
        for resting in found.resting:
            assert in_a_row[resting] >= 0
            assert all(jobs[resting][1] <= jobs[at][1] for at in trains)
        for at in range(len(jobs)):
            steps[at] += at in trains
            in_a_row[at] = max(in_a_row[at], 0) + 1 if at in trains else min(in_a_row[at], 1) - 1
            assert steps[at] >= iteration // 3


def test_packings_are_few_where_samples_are_too_long_to_fill_microbatches() -> None:
    tokens, asked = [4 * 60] * 8, []

    def pack(places: Sequence[int]) -> Bins:
        asked.append(places)
        return range(4 * len(places))

    batches = [NextBatch(count) for count in tokens]
    assert choose_resting(batches, pack, capacity=CAPACITY, min_fill=0.95).resting == ()
    assert len(asked) <= 2


def test_sets_are_bounded_and_quickly_found_for_many_jobs() -> None:
    batches = [NextBatch(37 + 211 * at % 97) for at in range(256)]
    sets = resting_sets(batches, capacity=8192, min_fill=0.95, below=3)
    assert 0 < len(sets) <= 9

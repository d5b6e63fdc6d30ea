"""First-fit decreasing: every sample once, in order, within capacity; refusals that name the sample."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch
from plait.planner.packing import first_fit_decreasing, pack, padded


def batch(job: str, lengths: list[int], *, step: int = 0, first: int = 0) -> GlobalBatch:
    count = len(lengths)
    samples = tuple(range(first, first + count))
    return GlobalBatch(job, step, samples, tuple(range(count)), tuple(lengths), 1.0 / sum(lengths))


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(1, 16),
    st.integers(80, 200),
)
def test_every_sample_comes_once_with_its_draw_and_length(
    lengths: list[list[int]], tile: int, capacity: int
) -> None:
    batches = [batch(f"job{a}", own, step=a, first=100 * a) for a, own in enumerate(lengths)]
    packed = pack(batches, capacity=capacity, tile=tile, replica=3)
    assert [item.index for item in packed] == list(range(len(packed)))
    assert all(item.replica == 3 and 0 < item.padded(tile) <= capacity for item in packed)
    for own in batches:
        segments = [s for item in packed for s in item.segments if s.job == own.job]
        assert all(
            (s.step, s.loss_weight, s.split) == (own.step, own.loss_weight, own.split) for s in segments
        )
        rows = [row for s in segments for row in zip(s.samples, s.draws, s.lengths, strict=True)]
        assert sorted(rows) == list(zip(own.samples, own.draws, own.lengths, strict=True))
        assert all(list(s.samples) == sorted(s.samples) for s in segments)
    for item in packed:
        names = [s.job for s in item.segments]
        assert names == sorted(set(names))  # the order of the batches, one segment each


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=8, max_size=20), min_size=1, max_size=4),
    st.integers(1, 16),
    st.integers(80, 200),
)
def test_each_sample_is_in_the_first_bin_that_had_room(
    lengths: list[list[int]], tile: int, capacity: int
) -> None:
    """As a search through all bins finds it."""
    bins: list[list[tuple[int, int]]] = []
    places = [(a, at) for a, own in enumerate(lengths) for at in range(len(own))]
    for item in sorted(places, key=lambda place: (-lengths[place[0]][place[1]], place)):
        for own in bins:
            held = Counter[int]()
            for a, at in (*own, item):
                held[a] += lengths[a][at]
            if sum(padded(tokens, tile) for tokens in held.values()) <= capacity:
                own.append(item)
                break
        else:
            bins.append([item])
    assert first_fit_decreasing(lengths, capacity=capacity, tile=tile) == bins


def test_segments_are_rounded_up_to_the_tile_one_by_one() -> None:
    batches = [batch("a", [9, 7]), batch("b", [5], first=50)]
    # 9 + 7 of one job take one tile of 16; with the other job's 5 that would be two
    assert len(pack(batches, capacity=16, tile=16)) == 2
    assert len(pack(batches, capacity=32, tile=16)) == 1
    assert len(pack(batches, capacity=21, tile=1)) == 1


def test_the_longest_sample_goes_first_into_the_first_bin_that_takes_it() -> None:
    packed = pack([batch("a", [3, 6, 4, 7])], capacity=10)
    assert [item.segments[0].lengths for item in packed] == [(3, 7), (6, 4)]


def test_a_sample_over_the_capacity_is_named() -> None:
    with pytest.raises(CapacityError, match=r"sample 31 of job long \(train\) has 65 tokens") as caught:
        pack([batch("short", [3]), batch("long", [5, 65], first=30)], capacity=64)
    assert "engine.capacity" in caught.value.remedy
    with pytest.raises(CapacityError):
        pack([batch("tiled", [61])], capacity=63, tile=16)  # four tiles are 64


def test_nothing_packs_into_nothing() -> None:
    assert pack([], capacity=8) == ()

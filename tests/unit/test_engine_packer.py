"""How the engine packs: never worse than first-fit, exact if that saves a microbatch, repeatable."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.plans import GlobalBatch
from plait.engine.iteration import Packer
from plait.planner.packing import pack
from plait.planner.subset_sums import bins_bound


def batch(job: str, *lengths: int) -> GlobalBatch:
    places = tuple(range(len(lengths)))
    return GlobalBatch(job, 1, places, (0,) * len(lengths), lengths, 1.0)


def test_a_microbatch_that_first_fit_wastes_is_saved() -> None:
    batches = [batch("a", 4, 4), batch("b", 3, 3, 3, 3)]
    assert len(pack(batches, capacity=10)) == 3
    packer = Packer(10)
    packed = packer.pack(batches)
    assert [microbatch.tokens for microbatch in packed] == [10, 10]
    assert packer.repeats


def test_where_nothing_is_saved_first_fit_stays() -> None:
    batches = [batch("a", 7, 5, 2), batch("b", 6, 3)]
    assert Packer(12).pack(batches) == pack(batches, capacity=12)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_sample_once_within_capacity_and_no_more_microbatches_than_first_fit(
    lengths: list[list[int]],
) -> None:
    batches = [batch(f"job {number}", *each) for number, each in enumerate(lengths)]
    packed = Packer(40).pack(batches)
    held = sorted(
        (segment.job, sample)
        for microbatch in packed
        for segment in microbatch.segments
        for sample in segment.samples
    )
    assert held == sorted((each.job, sample) for each in batches for sample in each.samples)
    assert all(microbatch.tokens <= 40 for microbatch in packed)
    assert bins_bound([each.lengths for each in batches], capacity=40) <= len(packed)
    assert len(packed) <= len(pack(batches, capacity=40))
    assert Packer(40).pack(batches) == packed

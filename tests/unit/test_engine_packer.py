"""How the engine packs: never worse than first-fit, exact if that saves a microbatch, repeatable."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import CapacityError
from plait.core.plans import GlobalBatch, Replica
from plait.engine.packer import Packer
from plait.planner.dispatch_step import Dispatcher, by_dispatch
from plait.planner.packing import pack
from plait.planner.subset_sums import bins_bound
from plait.planner.verify import ScheduleError, verify_contents


def batch(job: str, *lengths: int) -> GlobalBatch:
    places = tuple(range(len(lengths)))
    return GlobalBatch(job, 1, places, (0,) * len(lengths), lengths, 1.0)


def alone(capacity: int) -> Packer:
    return Packer([Replica(capacity=capacity)])


def test_a_microbatch_that_first_fit_wastes_is_saved() -> None:
    batches = [batch("a", 4, 4), batch("b", 3, 3, 3, 3)]
    assert len(pack(batches, capacity=10)) == 3
    packer = alone(10)
    packed = packer.pack(batches)
    assert [microbatch.tokens for microbatch in packed] == [10, 10]
    assert packer.repeats


def test_first_fit_is_kept_if_nothing_is_saved() -> None:
    batches = [batch("a", 7, 5, 2), batch("b", 6, 3)]
    assert alone(12).pack(batches) == pack(batches, capacity=12)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_sample_once_within_capacity_and_no_more_microbatches_than_first_fit(
    lengths: list[list[int]],
) -> None:
    batches = [batch(f"job {number}", *each) for number, each in enumerate(lengths)]
    packed = alone(40).pack(batches)
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
    assert alone(40).pack(batches) == packed


# ---- several replicas ------------------------------------------------------------------------------------


def replicas(*kinds: tuple[int, float]) -> list[Replica]:
    return [Replica(number, capacity=room, speed=speed) for number, (room, speed) in enumerate(kinds)]


def random_batches(source: random.Random, longest: int) -> tuple[GlobalBatch, ...]:
    lengths = [
        [source.randint(1, longest) for _ in range(source.randint(1, 9))] for _ in range(source.randint(1, 4))
    ]
    return tuple(batch(f"job {number}", *each) for number, each in enumerate(lengths))


def test_the_shares_of_all_replicas_make_up_the_global_batch() -> None:
    """300 random global batches, over replicas of up to four capacities and speeds."""
    source, done, packers = random.Random(5), 0, 0
    packer, rooms = Packer(replicas((80, 1.0))), [80]
    while done < 300:
        if done >= 20 * packers:
            more = packers % 3 + 1
            rooms = [80, *(source.choice((20, 40, 80)) for _ in range(more))]
            packer = Packer(replicas(*((room, source.choice((0.5, 1.0, 3.0))) for room in rooms)))
            packers += 1
        batches = random_batches(source, 80)
        packed = packer.pack(batches)
        verify_contents(packed, batches, dict(enumerate(rooms)))
        done += len(batches)
        held = Counter(
            (segment.job, row)
            for each in packed
            for segment in each.segments
            for row in zip(segment.samples, segment.draws, segment.lengths, strict=True)
        )
        assert held == Counter(
            (each.job, row)
            for each in batches
            for row in zip(each.samples, each.draws, each.lengths, strict=True)
        )


def test_a_sample_that_goes_to_two_replicas_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(batches: Any, replica_of: Any, ids: Any) -> Any:
        parts = by_dispatch(batches, replica_of, ids)
        return parts | {1: (*parts[1], replace(batches[0], samples=(0,), draws=(0,), lengths=(9,)))}

    packer = Packer(replicas((40, 1.0), (40, 1.0)))
    packer.pack([batch("a", 9, 8)])
    monkeypatch.setattr("plait.planner.dispatch_step.by_dispatch", doubled)
    with pytest.raises(ScheduleError, match="not asked for"):
        packer.pack([batch("a", 9, 8)])


def test_a_replica_that_is_twice_as_fast_takes_twice_as_much() -> None:
    packed = Packer(replicas((100, 2.0), (100, 1.0))).pack([batch("a", *[10] * 30)])
    tokens = Counter({0: 0, 1: 0})
    for each in packed:
        tokens[each.replica] += each.tokens
    assert tokens == {0: 200, 1: 100}


def test_a_sample_that_no_replica_takes_is_refused() -> None:
    for kinds in ([(10, 1.0)], [(10, 1.0), (10, 1.0)]):
        with pytest.raises(CapacityError, match="11 tokens"):
            Packer(replicas(*kinds)).pack([batch("a", 3, 11)])


def test_dispatch_counts_the_labelled_share_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has one over its labelled tokens as the weight of its loss."""
    shares: list[float] = []
    parts = Dispatcher.parts

    def noted(self: Dispatcher, batches: Any, share: float) -> Any:
        shares.append(share)
        return parts(self, batches, share)

    monkeypatch.setattr(Dispatcher, "parts", noted)
    batches = [replace(batch("a", 9, 3), loss_weight=1 / 4), replace(batch("b", 8), loss_weight=1 / 6)]
    Packer(replicas((40, 1.0), (40, 1.0))).pack(batches)
    assert shares == [pytest.approx(10 / 20)]


def test_packing_ahead_gives_the_same_as_packing_now(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = replicas((40, 1.0), (20, 1.0))
    first, second = [batch("a", 30, 8, 5)], [batch("a", 7, 6)]
    now = Packer(kinds)
    expected = now.pack(first), now.pack(second)
    packer = Packer(kinds)
    assert packer.capacity == 40
    packer.prepare(first)
    packer.prepare([batch("b", 90)])  # cannot be packed, and nobody asks for it
    assert packer.pack(first) == expected[0]
    packer.prepare(second)
    assert packer.pack(first) == expected[0]  # as an evaluation between two steps
    monkeypatch.setattr(packer, "_pack", None)  # it is not packed again
    assert packer.pack(second) == expected[1]


def test_a_packer_that_is_closed_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = alone(40)
    one.prepare([batch("a", 30)])  # which needs none
    packer, go, begun = Packer(replicas((40, 1.0), (20, 1.0))), threading.Event(), list[Any]()
    monkeypatch.setattr(packer, "_pack", lambda asked: (begun.append(asked), go.wait(5)))
    for length in (30, 8):
        packer.prepare([batch("a", length)])
    (own,) = (each for each in threading.enumerate() if each.name.startswith("packer"))
    packer.close()
    assert own.is_alive(), "what is being prepared is not waited for"
    go.set()
    own.join()
    assert len(begun) == 1, "what waits is not begun"
    assert not any(each.name.startswith("packer") for each in threading.enumerate())

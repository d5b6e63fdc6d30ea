"""Schedules: everything the builder makes passes the verifier, everything with one fault fails it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.core.plans import GlobalBatch, Microbatch, OptimiserStep, Segment
from plait.planner.packing_exact import GREEDY, packed_batches
from plait.planner.schedule import Draft, Piece, ScheduleItem, Turn, build_schedule, merge, turns
from plait.planner.verify import ScheduleError, verify, violations

TILES = (1, 8)


@dataclass
class Case:
    """A schedule and what it was made from."""

    batches: list[GlobalBatch]
    stages: dict[int, int]
    capacity: int
    tile: int
    items: tuple[ScheduleItem, ...]

    def faults(self, items: Sequence[ScheduleItem]) -> list[str]:
        return violations(items, self.batches, stages=self.stages, capacity=self.capacity, tile=self.tile)


def global_batch(job: str, step: int, lengths: Sequence[int], first: int) -> GlobalBatch:
    count = len(lengths)
    samples = tuple(range(first, first + count))
    return GlobalBatch(job, step, samples, (step,) * count, tuple(lengths), 1.0 / sum(lengths))


def share(batch: GlobalBatch, replica: int, replicas: int) -> GlobalBatch:
    own = [place for place in range(len(batch.samples)) if place % replicas == replica]
    return replace(
        batch,
        samples=tuple(batch.samples[place] for place in own),
        draws=tuple(batch.draws[place] for place in own),
        lengths=tuple(batch.lengths[place] for place in own),
    )


@st.composite
def cases(draw: st.DrawFn, *, replicas: int = 2, jobs: int = 4) -> Case:
    stages = {r: draw(st.integers(1, 4)) for r in range(draw(st.integers(1, replicas)))}
    tile, capacity = draw(st.sampled_from(TILES)), 8 * draw(st.integers(4, 8))
    names = [f"job{place}" for place in range(draw(st.integers(1, jobs)))]
    batches: dict[str, list[GlobalBatch]] = {}
    for name in names:
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        start = draw(st.integers(0, 3))
        batches[name] = []
        for step, size in enumerate(sizes, start):
            lengths = draw(st.lists(st.integers(1, 32), min_size=size, max_size=size))
            batches[name].append(global_batch(name, step, lengths, 10 * step))
    count = draw(st.integers(1, len(names)))
    groups = [names[place::count] for place in range(count)]
    order: list[Turn] = []
    for turn in turns(batches, groups):
        packed = {}
        for replica in stages:
            own = [part for part in (share(b, replica, len(stages)) for b in turn) if part.samples]
            if own:
                packed[replica] = packed_batches(own, capacity=capacity, tile=tile, limits=GREEDY)
        order.append(packed)
    merging = draw(st.booleans())
    items = build_schedule(order, stages, capacity=capacity, tile=tile, merging=merging)
    every = [batch for own in batches.values() for batch in own]
    return Case(every, stages, capacity, tile, items)


@settings(max_examples=200)
@given(cases())
def test_every_schedule_passes(case: Case) -> None:
    assert case.faults(case.items) == []
    verify(case.items, case.batches, stages=case.stages, capacity=case.capacity, tile=case.tile)


# One fault each. They return the faulty schedule, or None if the schedule has no place for it.
Planted = list[ScheduleItem] | None


def places(items: Sequence[ScheduleItem], kind: type, *, filled: bool = True) -> list[int]:
    return [
        place
        for place, item in enumerate(items)
        if isinstance(item, kind) and (not isinstance(item, Microbatch) or bool(item.segments) == filled)
    ]


def with_microbatch(items: Sequence[ScheduleItem], place: int, segments: Sequence[Segment]) -> Planted:
    item = items[place]
    assert isinstance(item, Microbatch)
    return [*items[:place], replace(item, segments=tuple(segments)), *items[place + 1 :]]


def change_segment(change: Callable[[Segment], Segment | None]) -> Callable[[Case, st.DataObject], Planted]:
    def plant(case: Case, data: st.DataObject) -> Planted:
        place = data.draw(st.sampled_from(places(case.items, Microbatch)))
        item = case.items[place]
        assert isinstance(item, Microbatch)
        which = data.draw(st.integers(0, len(item.segments) - 1))
        changed = change(item.segments[which])
        rest = [segment for number, segment in enumerate(item.segments) if number != which]
        return with_microbatch(case.items, place, rest + ([changed] if changed else []))

    return plant


def cut(segment: Segment, begin: int, end: int | None) -> Segment:
    return replace(
        segment,
        samples=segment.samples[begin:end],
        draws=segment.draws[begin:end],
        lengths=segment.lengths[begin:end],
    )


def without_last_sample(segment: Segment) -> Segment | None:
    return cut(segment, 0, -1) if len(segment.samples) > 1 else None


def with_last_sample_twice(segment: Segment) -> Segment:
    return replace(
        segment,
        samples=segment.samples + segment.samples[-1:],
        draws=segment.draws + segment.draws[-1:],
        lengths=segment.lengths + segment.lengths[-1:],
    )


def without_a_step(case: Case, data: st.DataObject) -> Planted:
    gone = data.draw(st.sampled_from(places(case.items, OptimiserStep)))
    return [item for place, item in enumerate(case.items) if place != gone]


def with_a_step_twice(case: Case, data: st.DataObject) -> Planted:
    place = data.draw(st.sampled_from(places(case.items, OptimiserStep)))
    return [*case.items[: place + 1], *case.items[place:]]


def step_before_its_backward(case: Case, data: st.DataObject) -> Planted:
    """The builder steps as early as can be: before one microbatch less, the gradient is not complete."""
    if len(case.stages) > 1:
        return None
    place = data.draw(st.sampled_from(places(case.items, OptimiserStep)))
    before = [p for p in range(place) if isinstance(case.items[p], Microbatch)]
    rest = [item for number, item in enumerate(case.items) if number != place]
    return [*rest[: before[-1]], case.items[place], *rest[before[-1] :]]


def step_after_the_next_forward(case: Case, data: st.DataObject) -> Planted:
    """Move a step behind the first microbatch that needed it."""
    place = data.draw(st.sampled_from(places(case.items, OptimiserStep)))
    step = case.items[place]
    assert isinstance(step, OptimiserStep)
    for later in range(place + 1, len(case.items)):
        item = case.items[later]
        if isinstance(item, Microbatch) and any(
            (segment.job, segment.step) == (step.job, step.step + 1) for segment in item.segments
        ):
            return [*case.items[:place], *case.items[place + 1 : later + 1], step, *case.items[later + 1 :]]
    return None


def without_a_noop(case: Case, data: st.DataObject) -> Planted:
    if len(case.stages) > 1 or not (empty := places(case.items, Microbatch, filled=False)):
        return None
    gone = data.draw(st.sampled_from(empty))
    left = [item for place, item in enumerate(case.items) if place != gone]
    return renumbered(left)


def renumbered(items: Sequence[ScheduleItem]) -> list[ScheduleItem]:
    counts: dict[int, int] = {}
    result: list[ScheduleItem] = []
    for item in items:
        if isinstance(item, Microbatch):
            index = counts.get(item.replica, 0)
            counts[item.replica] = index + 1
            result.append(replace(item, index=index))
        else:
            result.append(item)
    return result


def contents_of_two_steps_swapped(case: Case, data: st.DataObject) -> Planted:
    """Exchange the samples of two microbatches if one job has different steps in them."""
    pairs = [
        (a, b)
        for a in places(case.items, Microbatch)
        for b in places(case.items, Microbatch)
        if a < b and _steps(case.items[a]) & {(job, step - 1) for job, step in _steps(case.items[b])}
    ]
    if not pairs:
        return None
    a, b = data.draw(st.sampled_from(pairs))
    first, second = case.items[a], case.items[b]
    assert isinstance(first, Microbatch)
    assert isinstance(second, Microbatch)
    swapped = with_microbatch(case.items, a, second.segments)
    assert swapped
    return with_microbatch(swapped, b, first.segments)


def _steps(item: ScheduleItem) -> set[tuple[str, int]]:
    assert isinstance(item, Microbatch)
    return {(segment.job, segment.step) for segment in item.segments}


def too_full(case: Case, data: st.DataObject) -> Planted:
    """Everything of two microbatches of one global batch in one of them, if that is too much."""
    filled = places(case.items, Microbatch)
    for a in filled:
        for b in filled:
            first, second = case.items[a], case.items[b]
            assert isinstance(first, Microbatch)
            assert isinstance(second, Microbatch)
            disjoint = not {s.job for s in first.segments} & {s.job for s in second.segments}
            if a != b and disjoint and first.padded(case.tile) + second.padded(case.tile) > case.capacity:
                joined = with_microbatch(case.items, a, first.segments + second.segments)
                assert joined
                return with_microbatch(joined, b, ())
    del data
    return None


def another_index(case: Case, data: st.DataObject) -> Planted:
    place = data.draw(st.sampled_from(places(case.items, Microbatch)))
    item = case.items[place]
    assert isinstance(item, Microbatch)
    return [*case.items[:place], replace(item, index=item.index + 1), *case.items[place + 1 :]]


def another_replica(case: Case, data: st.DataObject) -> Planted:
    place = data.draw(st.sampled_from(places(case.items, Microbatch)))
    item = case.items[place]
    assert isinstance(item, Microbatch)
    return [*case.items[:place], replace(item, replica=99), *case.items[place + 1 :]]


FAULTS: dict[str, Callable[[Case, st.DataObject], Planted]] = {
    "a sample missing": change_segment(without_last_sample),
    "a sample twice": change_segment(with_last_sample_twice),
    "another length": change_segment(lambda s: replace(s, lengths=(s.lengths[0] + 1, *s.lengths[1:]))),
    "another draw": change_segment(lambda s: replace(s, draws=(s.draws[0] + 1, *s.draws[1:]))),
    "another weight": change_segment(lambda s: replace(s, loss_weight=s.loss_weight * 2)),
    "another split": change_segment(lambda s: replace(s, split="validation")),
    "another job": change_segment(lambda s: replace(s, job="stranger")),
    "another step": change_segment(lambda s: replace(s, step=s.step + 1)),
    "a list cut short": change_segment(lambda s: replace(s, draws=s.draws[:-1])),
    "no step": without_a_step,
    "a step twice": with_a_step_twice,
    "a step too early": step_before_its_backward,
    "a step too late": step_after_the_next_forward,
    "no no-op": without_a_noop,
    "two steps swapped": contents_of_two_steps_swapped,
    "over capacity": too_full,
    "another index": another_index,
    "another replica": another_replica,
}


@pytest.mark.parametrize("name", sorted(FAULTS))
@settings(max_examples=50)
@given(data=st.data())
def test_every_planted_fault_is_found(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(replicas=1 if name in ("a step too early", "no no-op") else 2))
    faulty = FAULTS[name](case, data)
    assume(faulty is not None)
    assert faulty is not None
    assert case.faults(faulty)
    with pytest.raises(ScheduleError):
        verify(faulty, case.batches, stages=case.stages, capacity=case.capacity, tile=case.tile)


def two_steps(distance: int, stages: int) -> tuple[list[ScheduleItem], list[GlobalBatch]]:
    """One job, two global batches of one microbatch each, so many microbatches apart."""
    batches = [global_batch("a", step, [4], 10 * step) for step in range(2)]
    segments = [Segment(b.job, b.step, b.samples, b.draws, b.lengths, b.loss_weight) for b in batches]
    items: list[ScheduleItem] = [Microbatch(0, 0, (segments[0],))]
    items += [Microbatch(0, index, ()) for index in range(1, distance)]
    items += [OptimiserStep("a", 0), Microbatch(0, distance, (segments[1],)), OptimiserStep("a", 1)]
    del stages
    return items, batches


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_the_bubble_lemma_needs_a_distance_of_all_stages(stages: int) -> None:
    enough, batches = two_steps(stages, stages)
    assert violations(enough, batches, stages={0: stages}, capacity=4) == []
    if stages > 1:  # LoRAFusion's statement of the lemma: too early by one
        less, _ = two_steps(stages - 1, stages)
        faults = violations(less, batches, stages={0: stages}, capacity=4)
        assert any("stage 0: step 0 of a" in fault for fault in faults)


def test_a_forward_on_old_weights_is_named() -> None:
    items, batches = two_steps(1, 1)
    late = [items[0], items[2], items[1], items[3]]
    faults = violations(late, batches, stages={0: 1}, capacity=4)
    assert faults == ["replica 0 stage 0: forward of microbatch 1, a step 1, sees weights after 0 steps"]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_single_job_waits_with_noops_and_steps_immediately(stages: int) -> None:
    batches = {"a": [global_batch("a", step, [8, 8], 10 * step) for step in range(3)]}
    order: list[Turn] = [
        {0: packed_batches(turn, capacity=8, limits=GREEDY)} for turn in turns(batches, [["a"]])
    ]
    items = build_schedule(order, {0: stages}, capacity=8)
    noops = [item for item in items if isinstance(item, Microbatch) and not item.segments]
    assert len(noops) == 2 * (stages - 1)
    kinds = ["S" if isinstance(item, OptimiserStep) else "M" if item.segments else "-" for item in items]
    gap = ["-"] * (stages - 1)
    assert kinds == [*"MM", *gap, "S", *"MM", *gap, "S", *"MM", "S"]


def test_groups_take_turns_with_different_numbers_of_steps() -> None:
    batches = {
        "a": [global_batch("a", step, [2], step) for step in range(3)],
        "b": [global_batch("b", 0, [2], 0)],
        "c": [global_batch("c", step, [2], step) for step in range(2)],
    }
    order = [[(b.job, b.step) for b in turn] for turn in turns(batches, [["a", "b"], ["c"]])]
    assert order == [[("a", 0), ("b", 0)], [("c", 0)], [("a", 1)], [("c", 1)], [("a", 2)]]


def draft(job: str, lengths: Sequence[int], tile: int = 1, step: int = 0) -> Draft:
    batch = global_batch(job, step, lengths, 0)
    return Draft(tile, [Piece(batch, place) for place in range(len(lengths))])


def test_merging_moves_whole_microbatches_then_fills_up() -> None:
    target, sources = draft("a", [4]), [draft("b", [9]), draft("c", [5, 2, 1]), draft("b", [2], step=1)]
    assert merge(target, sources, {"b", "c"}, capacity=12) == 2 + 6
    assert target.fill == 12
    assert [source.fill for source in sources] == [9, 2]


def test_merging_leaves_jobs_that_are_not_ready() -> None:
    target, sources = draft("a", [4]), [draft("b", [2])]
    assert merge(target, sources, {"c"}, capacity=12) == 0
    assert [source.fill for source in sources] == [2]


def test_merging_counts_padding() -> None:
    target, sources = draft("a", [4], tile=8), [draft("b", [3, 3, 3], tile=8)]
    assert merge(target, sources, {"b"}, capacity=16) == 6  # three of 3 tokens would take two tiles
    assert target.fill == 16


@settings(max_examples=60)
@given(cases(replicas=1))
def test_merging_never_adds_microbatches(case: Case) -> None:
    names = list(dict.fromkeys(batch.job for batch in case.batches))
    batches = {name: [batch for batch in case.batches if batch.job == name] for name in names}
    order: list[Turn] = [
        {0: packed_batches(turn, capacity=case.capacity, tile=case.tile, limits=GREEDY)}
        for turn in turns(batches, [[name] for name in names])
    ]
    counts = {}
    for merging in (False, True):
        items = build_schedule(order, case.stages, capacity=case.capacity, tile=case.tile, merging=merging)
        assert case.faults(items) == []
        counts[merging] = len(places(items, Microbatch)) + len(places(items, Microbatch, filled=False))
    assert counts[True] <= counts[False]

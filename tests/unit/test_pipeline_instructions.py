"""Every order of a pipeline becomes lists that pass the check; lists with one fault do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.core.plans import GlobalBatch, Microbatch
from plait.planner.instructions import Instruction, Replay, raise_if
from plait.planner.packing_exact import GREEDY
from plait.planner.verify import ScheduleError
from plait.simulate.events import OneFOneB, SimulationError
from plait.simulate.lowering import lower
from plait.simulate.orders import ORDERS, OrderName, arrange

CAPACITY = 40
Lists = list[list[Instruction]]


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, list[GlobalBatch]]:
    """Jobs that begin at different steps and end after different numbers of them."""
    found: dict[str, list[GlobalBatch]] = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        start, sizes = draw(st.integers(0, 2)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        found[name] = []
        for step, size in enumerate(sizes, start):
            lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=size, max_size=size))
            samples = tuple(range(10 * step, 10 * step + size))
            weight = 1 / sum(lengths)
            found[name].append(GlobalBatch(name, step, samples, (0,) * size, tuple(lengths), weight))
    return found


def lowered(
    name: OrderName, batches: dict[str, list[GlobalBatch]], stages: int
) -> tuple[Lists, tuple[Microbatch, ...]]:
    found = arrange(name, batches, stages=stages, capacity=CAPACITY, limits=GREEDY)
    return lower(found.microbatches, stages, found.order), found.microbatches


def faults_of(lists: Lists, microbatches: Sequence[Microbatch]) -> list[str]:
    return Replay(len(lists)).add(lists, dict(enumerate(microbatches)))


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=60)
@given(batches=jobs(), stages=st.integers(1, 4))
def test_every_order_passes_with_all_samples_in_it(
    name: OrderName, batches: dict[str, list[GlobalBatch]], stages: int
) -> None:
    lists, microbatches = lowered(name, batches, stages)
    assert faults_of(lists, microbatches) == []
    asked = {(b.job, b.step, sample) for own in batches.values() for b in own for sample in b.samples}
    rows = [(p.job, p.step, sample) for each in microbatches for p in each.segments for sample in p.samples]
    assert len(rows) == len(asked)
    assert set(rows) == asked
    kinds = {each.kind for own in lists for each in own}
    assert ("send_hidden" in kinds) == (stages > 1)


# One fault each, planted into one stage's list. None: the lists have no place for it.
Planted = Lists | None


def moved(lists: Lists, stage: int, place: int, to: int) -> Lists:
    own = list(lists[stage])
    own.insert(to, own.pop(place))
    return [*lists[:stage], own, *lists[stage + 1 :]]


def places(lists: Lists, stage: int, kind: str) -> list[int]:
    return [place for place, each in enumerate(lists[stage]) if each.kind == kind]


def step_too_early(lists: Lists, data: st.DataObject) -> Planted:
    stage = data.draw(st.integers(0, len(lists) - 1))
    place = data.draw(st.sampled_from(places(lists, stage, "step")))
    before = [p for p in places(lists, stage, "backward") if p < place]
    return moved(lists, stage, place, before[-1]) if stage == 0 else moved(lists, stage, place, place - 1)


def step_too_late(lists: Lists, data: st.DataObject) -> Planted:
    """At the end of all, though the job has another batch."""
    stage = data.draw(st.integers(0, len(lists) - 1))
    steps = places(lists, stage, "step")
    every = {key for place in steps for key in lists[stage][place].keys}
    needed = [p for p in steps if any((job, step + 1) in every for job, step in lists[stage][p].keys)]
    if not needed:
        return None
    place = data.draw(st.sampled_from(needed))
    return moved(lists, stage, place, len(lists[stage]) - 1)


def forwards_swapped(lists: Lists, data: st.DataObject) -> Planted:
    stage = data.draw(st.integers(0, len(lists) - 1))
    places_of = places(lists, stage, "forward")
    if len(places_of) < 2 or len(lists) == 1:
        return None
    a = data.draw(st.integers(0, len(places_of) - 2))
    first, second = places_of[a], places_of[a + 1]
    own = list(lists[stage])
    own[first], own[second] = own[second], own[first]
    return [*lists[:stage], own, *lists[stage + 1 :]]


def gone(kind: str) -> Callable[[Lists, st.DataObject], Planted]:
    def plant(lists: Lists, data: st.DataObject) -> Planted:
        stage = data.draw(st.integers(0, len(lists) - 1))
        if not (found := places(lists, stage, kind)):
            return None
        place = data.draw(st.sampled_from(found))
        return [*lists[:stage], lists[stage][:place] + lists[stage][place + 1 :], *lists[stage + 1 :]]

    return plant


def without_keys(kind: str) -> Callable[[Lists, st.DataObject], Planted]:
    """A norm that neither is sent nor is expected."""

    def plant(lists: Lists, data: st.DataObject) -> Planted:
        stage = data.draw(st.integers(0, len(lists) - 1))
        found = [place for place in places(lists, stage, kind) if lists[stage][place].keys]
        if not found:
            return None
        bare = lists[stage][data.draw(st.sampled_from(found))]
        other = {"send_hidden": "receive_hidden", "send_gradient": "receive_gradient"}[kind]
        return [
            [
                each._replace(keys=())
                if each.microbatch == bare.microbatch
                and each.kind in (kind, other)
                and each.keys == bare.keys
                else each
                for each in own
            ]
            for own in lists
        ]

    return plant


def waiting_in_a_circle(lists: Lists, data: st.DataObject) -> Planted:
    """The first stage wants a gradient before it sends what the gradient comes from."""
    del data
    if len(lists) == 1:
        return None
    return moved(lists, 0, places(lists, 0, "receive_gradient")[0], 0)


FAULTS: dict[str, Callable[[Lists, st.DataObject], Planted]] = {
    "a step too early": step_too_early,
    "a step too late": step_too_late,
    "two forwards swapped": forwards_swapped,
    "a forward missing": gone("forward"),
    "a backward missing": gone("backward"),
    "a step missing": gone("step"),
    "hidden states not sent": gone("send_hidden"),
    "hidden states not received": gone("receive_hidden"),
    "a gradient not sent": gone("send_gradient"),
    "a gradient not received": gone("receive_gradient"),
    "no sum of squares": without_keys("send_gradient"),
    "no total": without_keys("send_hidden"),
    "a deadlock": waiting_in_a_circle,
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
@settings(max_examples=30)
@given(data=st.data(), batches=jobs(), stages=st.integers(1, 4), name=st.sampled_from(ORDERS))
def test_every_planted_fault_is_found(
    fault: str, data: st.DataObject, batches: dict[str, list[GlobalBatch]], stages: int, name: OrderName
) -> None:
    lists, microbatches = lowered(name, batches, stages)
    faulty = FAULTS[fault](lists, data)
    assume(faulty is not None)
    assume(faulty != lists)
    assert faulty is not None
    assert faults_of(faulty, microbatches)


def one_job(steps: int) -> dict[str, list[GlobalBatch]]:
    return {"a": [GlobalBatch("a", step, (step,), (0,), (8,), 1 / 8) for step in range(steps)]}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_without_its_noops_a_schedule_is_not_lowered(stages: int) -> None:
    found = arrange("plait", one_job(2), stages=stages, capacity=CAPACITY)
    assert len(found.microbatches) == stages + 1
    filled = [each for each in found.microbatches if each.segments]
    with pytest.raises(SimulationError, match="never ran"):
        lower(filled, stages, OneFOneB([2]))


def test_contents_of_two_steps_swapped_are_found() -> None:
    found = arrange("plait", one_job(2), stages=2, capacity=CAPACITY)
    lists = lower(found.microbatches, 2, found.order)
    first, noop, last = found.microbatches
    swapped = [replace(first, segments=last.segments), noop, replace(last, segments=first.segments)]
    assert any("after 0 steps" in fault for fault in faults_of(lists, swapped))
    with pytest.raises(ScheduleError, match="after 0 steps"):
        raise_if(faults_of(lists, swapped))


def test_a_job_steps_as_soon_as_its_batch_is_back_and_its_norm_travels() -> None:
    found = arrange("plait", one_job(1), stages=2, capacity=CAPACITY)
    key = (("a", 0),)
    assert lower(found.microbatches, 2, found.order) == [
        [
            Instruction("forward", 0),
            Instruction("send_hidden", 0),
            Instruction("receive_gradient", 0, key),
            Instruction("backward", 0),
            Instruction("step", keys=key),
            Instruction("send_hidden", keys=key),
        ],
        [
            Instruction("receive_hidden", 0),
            Instruction("forward", 0),
            Instruction("backward", 0),
            Instruction("send_gradient", 0, key),
            Instruction("receive_hidden", keys=key),
            Instruction("step", keys=key),
        ],
    ]

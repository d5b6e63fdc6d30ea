"""What a replica does with a schedule: its rounds, and when its share of a job's gradients is complete."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.core.messages import StepJob
from plait.core.plans import Microbatch, Segment
from plait.engine.schedules import Round, by_completion, rounds


def microbatch(*jobs: str, replica: int = 0, tokens: int = 4) -> Microbatch:
    parts = tuple(Segment(job, 1, (0,), (0,), (tokens,), 1.0) for job in jobs)
    return Microbatch(replica, 0, parts)


def step(job: str) -> StepJob:
    return StepJob(job, 1, 1e-3)


def test_a_round_ends_with_its_steps() -> None:
    first, second, third = microbatch("a"), microbatch("a", "b"), microbatch("b")
    found = rounds([first, second, step("a"), third, step("b"), step("c")])
    assert [each.microbatches for each in found] == [(first, second), (third,)]
    assert [each.steps for each in found] == [(step("a"),), (step("b"), step("c"))]
    assert [each.steps for each in rounds([first])] == [()]
    assert rounds([]) == [Round((), ())]


def test_gradients_are_complete_after_the_last_microbatch_but_not_out_of_turn() -> None:
    (turn,) = rounds([microbatch("a"), microbatch("b"), *map(step, ("c", "b", "a"))])
    assert turn.complete() == [("c",), (), ("b", "a")]


JOBS = st.sampled_from("abcd")


@given(st.lists(st.lists(JOBS, min_size=1, unique=True), max_size=6), st.lists(JOBS, min_size=1, unique=True))
def test_every_job_is_added_up_once_in_the_order_of_steps_and_after_its_microbatches(
    held: list[list[str]], jobs: list[str]
) -> None:
    (turn,) = rounds([*(microbatch(*each) for each in held), *map(step, jobs)])
    ready = turn.complete()
    assert len(ready) == len(held) + 1
    assert [job for each in ready for job in each] == jobs
    for number, each in enumerate(ready):
        assert not set(each) & {job for later in held[number:] for job in later}


def test_who_is_soonest_through_is_added_up_first() -> None:
    """A job's end is that on the replica that is through with it last, by the share of its tokens."""
    held = [
        microbatch("a", "b", tokens=6),
        microbatch("c", tokens=4),
        microbatch("c", replica=1, tokens=9),
        microbatch("b", replica=1, tokens=1),
    ]
    assert by_completion("cba", held) == ["a", "c", "b"]

"""Admission: priority, arrival, memory, and who makes room."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from plait.engine.jobs import admit


@dataclass(frozen=True)
class Job:
    name: str
    priority: int = 0
    arrival: int = 0
    size: int = 1
    running: bool = False


@dataclass(frozen=True)
class Admitted:
    """Names of the jobs that train, that make room, and that go on waiting."""

    training: tuple[str, ...]
    preempted: tuple[str, ...]
    waiting: tuple[str, ...]


def admitted(jobs: list[Job], available: int, max_jobs: int | None = None) -> Admitted:
    ordered = sorted(jobs, key=lambda job: (-job.priority, job.arrival))
    chosen = admit(ordered, lambda group: sum(job.size for job in group) <= available, max_jobs)
    left = [job for job in ordered if job not in chosen]
    return Admitted(
        tuple(job.name for job in chosen),
        tuple(job.name for job in left if job.running),
        tuple(job.name for job in left if not job.running),
    )


def test_priority_comes_before_arrival() -> None:
    jobs = [Job("early", arrival=0), Job("late", arrival=1), Job("urgent", priority=5, arrival=2)]
    found = admitted(jobs, available=2)
    assert found.training == ("urgent", "early")
    assert found.waiting == ("late",)


def test_higher_priority_preempts_a_running_job_which_resumes_later() -> None:
    jobs = [
        Job("a", arrival=0, running=True),
        Job("b", arrival=1, running=True),
        Job("c", priority=1, arrival=2),
    ]
    found = admitted(jobs, available=2)
    assert (found.training, found.preempted) == (("c", "a"), ("b",))
    after = [replace(job, running=job.name in found.training) for job in jobs if job.name != "c"]
    assert admitted(after, available=2).training == ("a", "b")


def test_equal_priority_never_preempts_an_earlier_job() -> None:
    jobs = [Job("a", arrival=0, size=2, running=True), Job("b", arrival=1, size=1)]
    found = admitted(jobs, available=2)
    assert (found.training, found.preempted, found.waiting) == (("a",), (), ("b",))


def test_room_left_by_a_large_job_is_used_and_given_back() -> None:
    running = Job("first", arrival=0, size=2, running=True)
    large, small = Job("large", arrival=1, size=3), Job("small", arrival=2, size=1)
    found = admitted([running, large, small], available=3)
    assert found.training == ("first", "small")
    later = admitted([large, replace(small, running=True)], available=3)
    assert (later.training, later.preempted) == (("large",), ("small",))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=12),
    st.integers(6, 20),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_memory_is_never_exceeded_and_no_job_is_lost(
    rows: list[tuple[int, int, bool]], available: int, max_jobs: int | None
) -> None:
    jobs = [
        Job(str(index), priority=priority, arrival=index, size=size, running=running)
        for index, (priority, size, running) in enumerate(rows)
    ]
    found = admitted(jobs, available, max_jobs)
    by_name = {job.name: job for job in jobs}
    assert sorted((*found.training, *found.preempted, *found.waiting)) == sorted(by_name)
    assert sum(by_name[name].size for name in found.training) <= available
    assert max_jobs is None or len(found.training) <= max_jobs
    again = [replace(job, running=job.name in found.training) for job in jobs]
    settled = admitted(again, available, max_jobs)
    assert settled.training == found.training
    assert settled.preempted == ()
    for name in (*found.preempted, *found.waiting):  # whoever is left out gave way only to those before it
        job = by_name[name]
        before = [
            by_name[other]
            for other in found.training
            if (-by_name[other].priority, by_name[other].arrival) < (-job.priority, job.arrival)
        ]
        full = max_jobs is not None and len(before) >= max_jobs
        assert full or sum(each.size for each in before) + job.size > available

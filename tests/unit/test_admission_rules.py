"""Admission: priority, arrival, memory, and who makes room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import CapacityError, ConfigError
from plait.cost.memory import MemoryCoefficients, MemoryModel
from plait.planner.admission import Applicant, GroupMemory, admit


def _job(
    name: str, *, priority: int = 0, arrival: int = 0, size: int = 1, running: bool = False
) -> Applicant:
    return Applicant(name, priority, arrival, size, rank=8, running=running)


def _total(jobs: Sequence[Applicant]) -> float:
    return float(sum(job.adapter_bytes for job in jobs))


def test_priority_comes_before_arrival() -> None:
    jobs = [_job("early", arrival=0), _job("late", arrival=1), _job("urgent", priority=5, arrival=2)]
    found = admit(jobs, available=2, predict=_total)
    assert found.training == ("urgent", "early")
    assert found.waiting == ("late",)


def test_higher_priority_parks_a_running_job_and_it_comes_back() -> None:
    jobs = [
        _job("a", arrival=0, running=True),
        _job("b", arrival=1, running=True),
        _job("c", priority=1, arrival=2),
    ]
    found = admit(jobs, available=2, predict=_total)
    assert (found.training, found.started, found.preempted) == (("c", "a"), ("c",), ("b",))
    after = [replace(job, running=job.name in found.training) for job in jobs if job.name != "c"]
    assert admit(after, available=2, predict=_total).training == ("a", "b")


def test_equal_priority_never_parks_an_earlier_job() -> None:
    jobs = [_job("a", arrival=0, size=2, running=True), _job("b", arrival=1, size=1)]
    found = admit(jobs, available=2, predict=_total)
    assert (found.training, found.preempted, found.waiting) == (("a",), (), ("b",))


def test_room_left_by_a_large_job_is_used_and_given_back() -> None:
    running = _job("first", arrival=0, size=2, running=True)
    large, small = _job("large", arrival=1, size=3), _job("small", arrival=2, size=1)
    found = admit([running, large, small], available=3, predict=_total)
    assert found.training == ("first", "small")
    later = admit([large, replace(small, running=True)], available=3, predict=_total)
    assert (later.training, later.preempted) == (("large",), ("small",))


def test_job_that_never_fits_is_refused_by_name() -> None:
    with pytest.raises(CapacityError, match="job big needs"):
        admit([_job("big", size=5)], available=4, predict=_total)


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="two jobs"):
        admit([_job("a"), _job("a", arrival=1)], available=4, predict=_total)


def test_group_memory_counts_base_adapters_and_the_heaviest_microbatch() -> None:
    coefficients = MemoryCoefficients(fixed=10.0, token=1.0, square=0.5, labelled=2.0, rank_token=0.25)
    memory = GroupMemory(MemoryModel.of(coefficients, margin=0.1), base_bytes=1000, capacity=10, longest=4)
    jobs = [_job("a", size=5), replace(_job("b", arrival=1, size=7), rank=16)]
    shape_bytes = 10 + 1.0 * 10 + 0.5 * (16 + 16 + 4) + 2.0 * 10 + 0.25 * 16 * 10
    assert memory(jobs) == pytest.approx(1000 + 12 + 1.1 * shape_bytes)
    assert memory([]) == 1000


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=12),
    st.integers(6, 20),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_memory_is_never_exceeded_and_no_job_is_lost(
    rows: list[tuple[int, int, bool]], available: int, max_jobs: int | None
) -> None:
    jobs = [
        _job(str(index), priority=priority, arrival=index, size=size, running=running)
        for index, (priority, size, running) in enumerate(rows)
    ]
    found = admit(jobs, available=available, predict=_total, max_jobs=max_jobs)
    by_name = {job.name: job for job in jobs}
    assert sorted((*found.training, *found.preempted, *found.waiting)) == sorted(by_name)
    assert found.bytes == sum(by_name[name].adapter_bytes for name in found.training) <= available
    assert max_jobs is None or len(found.training) <= max_jobs
    again = [replace(job, running=job.name in found.training) for job in jobs]
    settled = admit(again, available=available, predict=_total, max_jobs=max_jobs)
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
        assert full or _total(before) + job.adapter_bytes > available

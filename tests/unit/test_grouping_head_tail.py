"""Head-tail grouping and the number of groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import ConfigError
from plait.core.plans import GlobalBatch
from plait.planner.grouping import JobLoad, expected_noops, group_jobs, head_tail, job_load


def loads(*means: float, batch: int = 16) -> list[JobLoad]:
    return [JobLoad(f"j{place}", mean, batch) for place, mean in enumerate(means)]


def test_the_load_of_a_job_is_the_mean_of_its_batches() -> None:
    lengths = ((10, 20, 30), (40,))
    batches = (GlobalBatch("a", 1, (0,) * len(own), (0,) * len(own), own, 1.0) for own in lengths)
    assert job_load("a", batches) == JobLoad("a", 25.0, 2)
    assert JobLoad("a", 25.0, 2).tokens == 50.0
    assert job_load("b", ()) == JobLoad("b", 0.0, 0)


def test_jobs_with_the_shortest_and_longest_samples_are_paired() -> None:
    assert head_tail(loads(500, 900, 1800, 700), 2) == (("j0", "j2"), ("j3", "j1"))
    assert head_tail(loads(1, 2, 3, 4, 5, 6), 3) == (("j0", "j5"), ("j1", "j4"), ("j2", "j3"))


@given(st.lists(st.floats(1, 4000), min_size=1, max_size=9), st.data())
def test_every_job_is_in_one_group_and_sizes_differ_by_one(means: list[float], data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, len(means)))
    grouping = head_tail(loads(*means), groups)
    assert sorted(job for group in grouping for job in group) == sorted(f"j{i}" for i in range(len(means)))
    sizes = [len(group) for group in grouping]
    assert max(sizes) - min(sizes) <= 1


def test_one_stage_makes_one_group() -> None:
    assert len(group_jobs(loads(100, 200, 300, 400), stages=1, capacity=2048)) == 1


def test_a_pipeline_gets_as_few_groups_as_keep_the_distance() -> None:
    jobs = loads(1100, 1100, 1100, 1100)  # 2.9 microbatches of 6144 each
    grouping = group_jobs(jobs, stages=4, capacity=6144)
    assert len(grouping) == 2
    assert expected_noops(grouping, jobs, stages=4, capacity=6144) == 0
    assert len(group_jobs(jobs[:1], stages=4, capacity=6144)) == 1
    assert expected_noops(head_tail(jobs, 1), jobs, stages=4, capacity=6144) == 3


def test_wrong_numbers_of_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups=3"):
        head_tail(loads(1, 2), 3)
    with pytest.raises(ConfigError, match="no jobs"):
        group_jobs([], stages=2, capacity=8)


def test_jobs_smaller_than_a_microbatch_still_make_a_group_for_each_stage() -> None:
    loads = [JobLoad(f"job {number}", 10.0 + number, 4) for number in range(8)]
    grouping = group_jobs(loads, stages=4, capacity=2048)
    assert sorted(map(len, grouping)) == [2, 2, 2, 2]
    assert expected_noops(grouping, loads, stages=4, capacity=2048) == 0

"""What a search puts through the model, and how its jobs are cut into waves."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import CapacityError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.plans import Replica
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import ClusterSettings, RunSettings
from plait.cost.time import LayerTime, TimeModel
from plait.engine.catalogue import DataCatalogue
from plait.planning.here import Here, fill_waves, plan_here
from plait.planning.outlook import Outlook
from plait.planning.workload import MOST_STEPS, Workload


def split(lengths: list[int]) -> Split:
    """Samples of which every second token, from the second on, is labelled."""
    return Split.of([Sample(np.zeros(n, np.int32), np.arange(n) % 2 == 1) for n in lengths])


def job(name: str, *, steps: int, priority: int = 0) -> JobSpec:
    train = TrainSpec(steps=steps, batch_size=2, priority=priority)
    return JobSpec(name, AdapterSpec(rank=1), train, DataSpec.of("jsonl"))


def catalogue() -> DataCatalogue:
    return DataCatalogue(lambda _: TokenisedData("digest", split([4, 6]), split([10])))


def test_the_first_steps_are_planned_and_represent_all() -> None:
    workload = Workload.of([job("long", steps=2 * MOST_STEPS), job("short", steps=3)], catalogue())
    assert [len(workload.batches[name]) for name in ("long", "short")] == [MOST_STEPS, 3]
    assert [phase.scale for phase in workload.phases(["long"])] == [2.0]
    assert [phase.scale for phase in workload.phases(["short"])] == [1.0]
    assert sorted(workload.batches["short"][0].lengths) == [4, 6]
    assert workload.longest == {"long": 10, "short": 10}
    assert workload.longest_is == dict.fromkeys(("long", "short"), "row 0 of its validation data")
    assert workload.labelled_share == 0.5


def test_of_huge_batches_few_steps_are_planned() -> None:
    jobs = [replace(job(name, steps=80), train=TrainSpec(steps=80, batch_size=10_000)) for name in "ab"]
    workload = Workload.of(jobs, catalogue())
    (phase,) = workload.phases(["a", "b"])
    assert [len(batches) for batches in phase.batches.values()] == [3, 3]  # 60,000 samples
    assert phase.scale == 80 / 3


def test_a_phase_ends_with_each_job() -> None:
    workload = Workload.of([job("a", steps=5), job("b", steps=2), job("c", steps=5)], catalogue())
    first, second = workload.phases(["a", "b", "c"])
    assert (first.steps, second.steps) == (2, 3)
    assert [list(phase.batches) for phase in (first, second)] == [["a", "b", "c"], ["a", "c"]]
    assert [len(phase.batches["a"]) for phase in (first, second)] == [2, 3]
    many = Workload.of([job(str(n), steps=50 * (n + 1)) for n in range(4)], catalogue())
    phases = many.phases(["0", "1", "2", "3"])
    assert [len(phase.batches["3"]) for phase in phases] == [16] * 4
    assert sum(phase.scale * len(phase.batches["3"]) for phase in phases) == 200


def test_higher_priority_goes_first() -> None:
    workload = Workload.of([job("a", steps=1), job("b", steps=1, priority=1)], catalogue())
    assert [each.name for each in workload.jobs] == ["b", "a"]


def test_a_sample_that_fits_nowhere_is_named() -> None:
    workload = Workload.of([job("a", steps=1)], catalogue())
    workload.check_fits(10, "The cluster")
    with pytest.raises(
        CapacityError, match="job a has a sample of 10 tokens \\(row 0 of its validation data\\)"
    ):
        workload.check_fits(9, "The cluster")


def planned(number: int, *, capacities: tuple[int, ...] = (), speeds: tuple[float, ...] = ()) -> Outlook:
    """The plan of two jobs on so many processes, each on a device of its own."""
    workload = Workload.of([job("a", steps=3), job("b", steps=2)], catalogue())
    admission: Any = SimpleNamespace(
        demand=lambda *_: None,
        fits=lambda _: True,
        predicted=lambda _: 0,
        predicted_on=lambda replica, _: 1000 + replica.capacity,
        model_for=lambda _: None,
    )
    time = TimeModel(2, {1: LayerTime(0.1, 0.01, 0.0)}, {})
    key = SimpleNamespace(dtype="float32", device="cuda")
    profile: Any = SimpleNamespace(model="m", key=key, how="measured", time=time, time_error=0.1)
    rooms, rates = capacities or (64,) * number, speeds or (1.0,) * number
    replicas = [
        Replica(at, devices=(f"cuda:{at}",), capacity=rooms[at], speed=rates[at]) for at in range(number)
    ]
    settings = RunSettings(cluster=ClusterSettings(processes=number, price_per_device_hour=2.0))
    return plan_here(
        workload, settings, admission, profile, Here("", replicas, number, dispatch=time, time=time)
    )


def test_one_process_has_no_table_of_processes() -> None:
    one = planned(1)
    assert one.processes == ()
    assert one.device_seconds == one.predicted_seconds
    assert not [line for line in one.assumptions if "processes" in line]


def test_processes_share_the_samples_and_every_device_is_paid_for() -> None:
    one, two = planned(1), planned(2)
    assert None not in (one.predicted_seconds, two.predicted_seconds, two.device_seconds, two.money)
    assert [each.device for each in two.processes] == ["cuda:0", "cuda:1"]
    # Steps 1 and 2 have samples of 4, 4, 6 and 6 tokens, which share evenly; step 3 has 4 and 6.
    assert sorted(each.tokens for each in two.processes) == [24, 26]
    busy = [each.busy_seconds or 0.0 for each in two.processes]
    # Two layers of 0.1 s and 0.01 s a token: of each step the longer one.
    assert sum(busy) == pytest.approx(6 * 0.2 + 50 * 0.02)
    assert two.predicted_seconds == pytest.approx(2 * (0.2 + 10 * 0.02) + 0.2 + 6 * 0.02)
    shares = [each.waiting_share for each in two.processes]
    assert shares == pytest.approx([1 - each / (two.predicted_seconds or 1) for each in busy])
    assert two.device_seconds == pytest.approx(2 * (two.predicted_seconds or 0))
    assert sum(group.device_seconds or 0 for group in two.groups) == pytest.approx(two.device_seconds)
    assert two.money == pytest.approx(2.0 * (two.device_seconds or 0) / 3600)
    assert [(each.count, each.capacity) for each in two.replicas] == [(2, 64)]
    assert [line for line in two.assumptions if "exchange" in line]


def test_a_process_with_less_room_gets_shorter_samples_and_holds_less() -> None:
    plan = planned(2, capacities=(5, 64), speeds=(1.0, 0.5))
    small, large = plan.processes
    assert small.tokens % 4 == 0  # samples of 6 tokens fit into the other alone
    assert (small.predicted_bytes, large.predicted_bytes) == (1005, 1064)
    assert [(each.count, each.capacity) for each in plan.replicas] == [(1, 5), (1, 64)]
    assert (large.busy_seconds or 0) > (small.busy_seconds or 0)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(9, 20))
def test_waves_keep_order_and_are_as_full_as_order_allows(weights: list[int], room: int) -> None:
    names = [f"{place} {weight}" for place, weight in enumerate(weights)]

    def weigh(wave: tuple[str, ...] | list[str]) -> int:
        return sum(int(name.split()[1]) for name in wave)

    waves = fill_waves(names, lambda wave: weigh(list(wave)) <= room)
    assert [name for wave in waves for name in wave] == names
    assert all(weigh(wave) <= room for wave in waves)
    assert all(weigh([*wave, after[0]]) > room for wave, after in pairwise(waves))

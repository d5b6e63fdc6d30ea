"""Which replicas a run's processes make: by the lengths of the jobs that train, where that pays."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
from curve_worker import LINEARS, CurveWorker
from laboratory import random_data, random_texts

from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.plans import Replica, ReplicaShape
from plait.core.settings import ClusterSettings, RunSettings
from plait.engine import redeployment
from plait.engine.admission import Demand
from plait.engine.jobs import LiveJob
from plait.engine.redeployment import MEASURED, Redeployment
from plait.engine.replicas import cut
from plait.engine.steps import DataOrder
from plait.engine.worker import HeldPart, WorkerFacts
from plait.planner.weighing import Change, MeanStep, Shape


def job(name: str, shortest: int, longest: int, steps: int, batch_size: int = 8) -> LiveJob:
    train = TrainSpec(steps=steps, batch_size=batch_size)
    spec = JobSpec(name, AdapterSpec(2), train, random_texts(1, shortest, longest, train=40))
    data = random_data(spec.data)
    longest = max(data.train.summary()["longest"], data.validation.summary()["longest"])
    return LiveJob(spec, data, DataOrder.over(train, data.train), Demand(1, longest), 0, 0.0)


def weighed(stages: tuple[int, ...]) -> tuple[Redeployment, list[tuple[int, ...]]]:
    asked: list[tuple[int, ...]] = []
    cluster = ClusterSettings(processes=3, capacities=(64, 64, 64), redeploy=True)
    made = Redeployment(RunSettings(cluster=cluster), None, asked.append)
    use(made, stages)
    return made, asked


def use(made: Redeployment, stages: tuple[int, ...], memory: int = 2**30, vocabulary: int = 16) -> None:
    facts = of_four_layers(stages, memory, vocabulary)
    made.use(facts, [Replica(n, pp=pp, capacity=64 * pp) for n, pp in enumerate(stages)])


def of_four_layers(stages: tuple[int, ...], memory: int, vocabulary: int = 16) -> WorkerFacts:
    facts = CurveWorker().facts
    shape = replace(facts.shape, layers=4, weight_bytes=10**6, vocabulary=vocabulary)
    part = HeldPart(range(4), 10**6, memory)
    held = tuple((part,) * each for each in stages)
    return replace(facts, shape=shape, linears=LINEARS, held=held)


def test_a_job_that_fits_nowhere_changes_the_deployment_at_once() -> None:
    made, asked = weighed((1, 1, 1))
    assert made.widest == 192
    short, long = job("short", 8, 20, 100, batch_size=2), job("long", 100, 120, 100, batch_size=2)
    assert not made.change([short])
    for _ in range(2):  # the first time, say, the disk refused the checkpoints
        assert made.change([short, long])
    assert asked == [(3,)] * 2  # of 1, 2 and 1 layers: no slower than ⟨1,2⟩ of 2 and 2, and sooner full


def test_when_long_jobs_have_gone_a_change_waits_until_it_pays() -> None:
    made, asked = weighed((1, 2))
    jobs = [job("short", 8, 20, 1000)]
    made.restart_seconds = 10.0
    assert not made.change(jobs)  # nothing was measured yet
    for _ in range(MEASURED):
        assert not made.change(jobs)
        made.took(0.001)
    assert not made.change(jobs)  # a thousand steps of a millisecond
    few, _ = weighed((1, 2))
    few.restart_seconds = 10.0
    few.change(jobs)
    for _ in range(MEASURED + 1):  # several of a pipeline's windows may be done at once
        few.took(1.0)
    assert few.change(jobs)
    assert asked == []
    use(few, (1, 1, 1))
    assert not few.change(jobs)


def test_without_memory_for_a_usual_job_anywhere_nothing_changes() -> None:
    made = Redeployment(RunSettings(cluster=ClusterSettings(processes=3, redeploy=True)), None, [].append)
    use(made, (1, 1, 1), memory=1000)
    assert not made.change([job("short", 8, 20, 10)])


def test_without_a_choice_nothing_is_weighed() -> None:
    made = Redeployment(RunSettings(cluster=ClusterSettings(processes=3)), None, None)
    use(made, (1, 1, 1))
    assert made.widest == 0
    assert not made.change([job("long", 100, 120, 10)])


def test_stages_are_weighed_with_the_layers_that_the_engine_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large head leaves the last stage fewer layers, so an even split would be slower than what is made."""
    seen: list[dict[int, tuple[int, ...]]] = []

    def weigh(current: Shape, step: MeanStep, _: float) -> Change:
        used = [*(each for each, _ in current), *(cost.configuration for cost in step.costs)]
        seen.append({each.pp: each.layer_split for each in used})
        return Change(None, None, 0.0, 0.0)

    monkeypatch.setattr(redeployment, "weigh_change", weigh)
    made, _ = weighed((1, 2))
    use(made, (1, 2), vocabulary=8000)
    assert not made.change([job("short", 8, 20, 100)])
    facts, settings = of_four_layers((1, 2), 2**30, 8000), RunSettings(cluster=ClusterSettings(processes=3))
    expected = {
        n: tuple(len(e.layers) for e in cut(facts, settings, (ReplicaShape(n),), 2**30)[0]) for n in (1, 2, 3)
    }
    assert expected[2] == (3, 1)
    assert seen == [expected]


@pytest.mark.parametrize("memory", [3_100_000, 4_000_000, 5_500_000])
def test_what_a_replica_could_take_does_not_depend_on_the_replicas_there_are(memory: int) -> None:
    """Stages hold adapters in parts, also those that whole replicas would make."""
    could = []
    for stages in ((1, 1, 1), (1, 2), (3,)):
        made = Redeployment(RunSettings(cluster=ClusterSettings(processes=3, redeploy=True)), None, [].append)
        use(made, stages, memory)
        could.append(dict(made._capacities))
    assert could == [could[0]] * 3


def test_a_sample_that_only_the_replicas_there_are_take_leaves_them_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Capacities add up, but which processes would make another replica is not known here."""
    weigh = Mock(wraps=redeployment.weigh_change)
    monkeypatch.setattr(redeployment, "weigh_change", weigh)
    asked: list[tuple[int, ...]] = []
    cluster = ClusterSettings(processes=2, capacities=(64, 128), deployment=(2,), redeploy=True)
    made = Redeployment(RunSettings(cluster=cluster), None, asked.append)
    made.use(of_four_layers((2,), 2**30), [Replica(0, pp=2, capacity=192)])
    for _ in range(2):
        assert not made.change([job("long", 160, 180, 100)])
    assert asked == []
    assert weigh.call_count == 1  # not in every iteration

"""Promise 1 over stages: an adapter trained on a pipeline ends where one process leaves it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from laboratory import (
    ENGINE,
    TINY,
    WEIGHT_TOLERANCE,
    History,
    Weights,
    assert_same,
    assert_same_bits,
    distance,
    random_data,
    stopping,
    with_train,
)
from peft_folders import stored_pairs
from processes import ForkedProcess, fleet
from saved_models import saved

from plait.adapters.variants import adapter_bytes
from plait.core.errors import ProcessError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobState, PauseReason
from plait.core.messages import (
    Attach,
    Attached,
    Cursor,
    Detach,
    Export,
    GroupStep,
    JobPaused,
    Notice,
    RunSchedule,
    StepDone,
    StepJob,
)
from plait.core.plans import GlobalBatch, Microbatch
from plait.core.settings import ClusterSettings, RunSettings
from plait.distributed.channel import Answer
from plait.distributed.fleet import Fleet, _check_alike
from plait.distributed.launch import Launcher
from plait.engine.adapter_store import AdapterStore
from plait.engine.build import worker_facts
from plait.engine.catalogue import DataCatalogue
from plait.engine.checkpoints import checkpoint_name
from plait.engine.coordinator import Coordinator
from plait.engine.local_worker import LocalWorker
from plait.engine.predictions import PEAKS_FILE
from plait.engine.steps import DataOrder, training_batch
from plait.engine.worker import WorkerFacts
from plait.models.load import inspect_model
from plait.models.targets import layer_of, resolve_targets
from plait.planner.packing import pack
from plait.planner.packing_exact import GREEDY
from plait.simulate.orders import ORDERS, arrange

STEPS = 5


def pipeline(split: tuple[int, ...]) -> dict[str, Any]:
    return {"pipeline": len(split), "layer_split": split} if len(split) > 1 else {}


def with_one_on_the_last_layer(jobs: list[JobSpec]) -> list[JobSpec]:
    """A job of which the first stages have nothing."""
    last = replace(jobs[0].adapter, target_modules=r".*\.3\.self_attn\..*")
    return [*jobs, replace(jobs[0], name="last", adapter=last)]


def test_stages_train_as_one_process_does(laboratory: Any, tmp_path: Path) -> None:
    lab, split = laboratory("llama"), (1, 1, 1, 1)
    jobs = with_one_on_the_last_layer(lab.group(dropout=0.1, steps=STEPS))
    alone = lab.undisturbed(jobs, kernels="grouped")
    cluster = ClusterSettings(processes=len(split), **pipeline(split))
    model = saved(TINY, tmp_path / "model")  # read by parts
    with fleet(len(split), model, ENGINE, tmp_path / "processes", **pipeline(split)) as worker:
        first = lab.run(jobs, worker=worker, cluster=cluster)
        assert_same_bits(lab.run(jobs, worker=worker, cluster=cluster), first, jobs)
        assert worker.facts.devices == (" + ".join(["cpu"] * len(split)),)
    assert_same(first, alone, jobs)


@pytest.mark.parametrize("deployment", [(1, 2), (2, 2)])
def test_replicas_with_stages_train_as_one_process_does(
    laboratory: Any, tmp_path: Path, deployment: tuple[int, ...]
) -> None:
    lab = laboratory("llama")
    jobs = with_one_on_the_last_layer(lab.group(dropout=0.1, steps=STEPS))
    alone = lab.undisturbed(jobs, kernels="grouped")
    processes = sum(deployment)
    own: dict[str, Any] = {"deployment": deployment, "capacities": (96, 64, 96, 64)[:processes]}
    cluster = ClusterSettings(processes=processes, **own)
    with fleet(processes, TINY, ENGINE, tmp_path / "processes", **own) as worker:
        first = lab.run(jobs, worker=worker, cluster=cluster)
        if deployment == (1, 2):
            assert_same_bits(lab.run(jobs, worker=worker, cluster=cluster), first, jobs)
        assert worker.facts.stages == deployment
    assert_same(first, alone, jobs)


def observed(
    lab: Any, jobs: list[JobSpec], schedule: Any, folder: Path
) -> tuple[list[GroupStep], WorkerFacts, RunSettings]:
    """Iterations on stages of three layers and of one, with what was predicted of them."""
    engine = replace(ENGINE, schedule=schedule)
    cluster = ClusterSettings(processes=2, **pipeline((3, 1)))
    with fleet(2, TINY, engine, folder / "processes", **pipeline((3, 1))) as worker:
        found = lab.run(jobs, schedule=schedule, worker=worker, cluster=cluster, folder=folder)
        return found.steps, worker.facts, RunSettings(model=TINY, engine=engine, cluster=cluster)


@pytest.mark.usefixtures("peaks")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "plait"])
def test_the_peak_of_each_stage_is_predicted_once_it_was_observed(
    laboratory: Any, tmp_path: Path, schedule: str
) -> None:
    """Of uneven stages, by the storage of their tensors, several microbatches of one among them."""
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=5)[:3]
    jobs = [with_train(each, batch_size=4, accumulation=3) for each in jobs]
    if schedule == "plait":  # windows are sent before the first that were observed have landed
        observed(lab, jobs, schedule, tmp_path / "before")
        (tmp_path / "run").mkdir()
        shutil.copy(tmp_path / "before" / PEAKS_FILE, tmp_path / "run")
    steps, facts, settings = observed(lab, jobs, schedule, tmp_path / "run")
    (held,) = facts.held
    assert [part.layers for part in held] == [range(3), range(3, 4)]
    (planned,) = worker_facts(settings, inspect_model(TINY, cache=tmp_path), 1).parts
    assert [part.weight_bytes for part in planned] == pytest.approx(
        [part.weight_bytes for part in held], rel=0.01
    )
    known = [each for each in steps if not each.bytes_by_rule and each.peak_bytes is not None]
    assert known
    for step in known:
        for time, part in zip(step.replicas, held, strict=True):
            assert time.peak_bytes is not None
            assert time.predicted_bytes is not None
            static = part.weight_bytes + sum(job_bytes(job, facts, part.layers) for job in jobs)
            above = time.peak_bytes - static
            print(step.iteration, part.layers, above, (time.predicted_bytes - static) / above - 1)
            assert time.predicted_bytes - static == pytest.approx(above, rel=0.02)


def job_bytes(job: JobSpec, facts: WorkerFacts, layers: range) -> int:
    names = resolve_targets(job.adapter.target_modules, facts.linears)
    own = [each for each in facts.linears if each.name in names and layer_of(each.name) in layers]
    return adapter_bytes(job.adapter, own, facts.shape.element_bytes)


def test_replicas_change_with_the_jobs_and_nothing_is_trained_twice(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=10)  # seconds are predicted from the last one on
    jobs[6] = with_train(jobs[6], steps=3)  # samples of up to 120 tokens
    jobs = [*jobs[:3], *jobs[4:]]  # the others have up to 60
    alone = lab.undisturbed(jobs, kernels="grouped")
    cluster = ClusterSettings(processes=3, capacities=(64, 64, 64), redeploy=True, join_seconds=240.0)
    settings = RunSettings(model=TINY, engine=ENGINE, cluster=cluster)
    deployments: list[tuple[int, ...]] = []
    with closing(Launcher(cluster, start=ForkedProcess)) as launcher:

        def together() -> Fleet:
            fleet = launcher.fleet(tmp_path / "processes", settings, DataCatalogue(random_data))
            deployments.append(fleet.facts.stages)
            return fleet

        def between(turn: int, coordinator: Coordinator) -> None:
            if turn == 2:
                coordinator.submit(jobs[-1])
            coordinator._redeployment.restart_seconds = 1e-9  # so that every gain pays

        found = lab.run(
            jobs[:-1],
            worker=together(),
            between=between,
            cluster=cluster,
            renew=together,
            prefer=launcher.prefer,
        )
    assert deployments == [(1, 1, 1), (1, 2), (1, 1, 1)]
    said = [each.text for each in found.events if isinstance(each, Notice)]
    assert any("3 processes train from now on, as replicas ⟨1,1⟩, ⟨1,2⟩" in text for text in said)
    print(said)
    assert_same(found, alone, jobs)


def test_interrupted_and_resumed_on_another_number_of_stages(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)[:4]
    alone = lab.undisturbed(jobs, kernels="grouped")
    parts: list[History] = []
    resume: dict[str, Path] = {}
    for turn, split in enumerate([(3, 1), (2, 1, 1)]):
        with fleet(len(split), TINY, ENGINE, tmp_path / str(turn), **pipeline(split)) as worker:
            cluster = ClusterSettings(processes=len(split), **pipeline(split))
            between = stopping(2 if turn == 0 else None)
            parts.append(lab.run(jobs, worker=worker, resume_from=resume, between=between, cluster=cluster))
        resume = parts[-1].checkpoints
    for job in jobs:
        assert [len(part.losses(job.name)) for part in parts] == [2, STEPS - 2]
    assert_same(reduce(History.before, parts), alone, jobs)


@pytest.mark.parametrize("alone", [False, True])
def test_a_stage_that_runs_out_of_memory_makes_room_and_changes_nothing(
    laboratory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)[: 1 if alone else 3]
    cluster = ClusterSettings(processes=2, join_seconds=240.0, **pipeline((3, 1)))
    settings = RunSettings(model=TINY, engine=ENGINE, cluster=cluster)
    monkeypatch.setattr(ForkedProcess, "short_at", {1: 4})
    launcher = Launcher(cluster, start=ForkedProcess)

    def together() -> Fleet:
        return launcher.fleet(tmp_path / "processes", settings, DataCatalogue(random_data))

    def again() -> Fleet:
        monkeypatch.setattr(ForkedProcess, "short_at", {})
        return together()

    with closing(launcher):
        found = lab.run(jobs, worker=together(), cluster=cluster, renew=again)
    assert [each.reason for each in found.events if isinstance(each, JobPaused)][: len(jobs)] == [
        PauseReason.LOST
    ] * len(jobs)
    if alone:
        assert found.ended(jobs[0].name).state is JobState.FAILED
        assert "stage 1 ran out of memory" in found.ended(jobs[0].name).reason
        return
    lost = max(place for place, each in enumerate(found.events) if isinstance(each, JobPaused))
    after = next(each for each in found.events[lost:] if isinstance(each, GroupStep))
    assert after.jobs == tuple(job.name for job in jobs[:2])
    assert_same(found, lab.undisturbed(lab.group(dropout=0.1, steps=STEPS), kernels="grouped"), jobs)


def test_a_stage_without_the_job_knows_that_a_best_was_kept(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    job = with_one_on_the_last_layer(lab.group())[-1]

    def stores() -> list[AdapterStore]:
        return [AdapterStore(lab.model, layers=layers) for layers in (range(3), range(3, 4))]

    first, last = stores()
    for each in (first, last):
        each.attach(job, "data")
        each.keep(job.name)
    folder = tmp_path / checkpoint_name(1)
    first.save(job.name, folder, Cursor(1, best_step=1, best_loss=1.0), [last])
    for each in stores():
        each.attach(job, "data", folder)
        assert each.has_best(job.name)


def test_stages_that_read_other_checkpoints_do_not_train() -> None:
    read = [Answer((Attached("a", Cursor(step)),)) for step in (3, 3, 0)]
    _check_alike("a", dict(enumerate(read[:2])))
    with pytest.raises(ProcessError, match=r"of steps 3, 3, 0"):
        _check_alike("a", dict(enumerate(read)))


def batches_of(lab: Any, jobs: list[JobSpec]) -> dict[str, list[GlobalBatch]]:
    """Three steps of each job; the second ends after two."""
    found = {}
    for number, job in enumerate(jobs):
        split = lab.data(job).train
        order = DataOrder.over(job.train, split)
        found[job.name] = [
            training_batch(job, order, split, step) for step in range(1, 3 if number == 1 else 4)
        ]
    return found


def with_steps(microbatches: Sequence[Microbatch], jobs: list[JobSpec]) -> list[Microbatch | StepJob]:
    """Each job's step after the last microbatch of its batch."""
    rates = {job.name: job.train.lr for job in jobs}
    left = Counter((part.job, part.step) for each in microbatches for part in each.segments)
    items: list[Microbatch | StepJob] = []
    for each in microbatches:
        items.append(each)
        for part in each.segments:
            left[part.job, part.step] -= 1
            if not left[part.job, part.step]:
                items.append(StepJob(part.job, part.step, rates[part.job]))
    return items


def test_every_order_gives_the_same_adapters(laboratory: Any, tmp_path: Path) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1)[1:4]
    batches = batches_of(lab, jobs)
    alone = LocalWorker(lab.model, DataCatalogue(random_data), ENGINE)
    starts, ends = {}, {}
    for job in jobs:
        alone.execute(Attach(job))
        starts[job.name] = copied(alone.bank.weights(job.name))
        for batch in batches[job.name]:
            alone.execute(RunSchedule(tuple(with_steps(pack([batch], capacity=160), jobs))))
        ends[job.name] = copied(alone.bank.weights(job.name))
    with fleet(3, TINY, ENGINE, tmp_path / "processes", **pipeline((1, 2, 1))) as worker:
        for name in ORDERS:
            for job in jobs:
                worker.execute(Attach(job))
            found = arrange(name, batches, stages=3, capacity=160, limits=GREEDY)
            events = worker.execute(RunSchedule(tuple(with_steps(found.microbatches, jobs)), name))
            assert sum(isinstance(event, StepDone) for event in events) == 8
            for job in jobs:
                folder = tmp_path / name / job.name
                worker.execute(Export(job.name, folder))
                worker.execute(Detach(job.name))
                update = distance(starts[job.name], ends[job.name])
                error = distance(stored_pairs(folder), ends[job.name])
                assert error <= WEIGHT_TOLERANCE * update, (name, job.name)


def copied(weights: Weights) -> Weights:
    return {site: tuple(tensor.clone() for tensor in own) for site, own in weights.items()}

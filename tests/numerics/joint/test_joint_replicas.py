"""Promise 1 over processes: an adapter trained on several replicas ends where one process leaves it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from functools import partial, reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import (
    ENGINE,
    LOSS_TOLERANCE,
    TINY,
    WEIGHT_TOLERANCE,
    History,
    assert_same,
    assert_same_bits,
    distance,
    random_data,
    stopping,
    with_train,
)
from processes import ForkedProcess, fleet, wait_no_longer
from torch import Tensor

from plait.core.lifecycle import PauseReason
from plait.core.messages import (
    Attach,
    JobPaused,
    JobProgress,
    Notice,
    OutOfMemory,
    RunSchedule,
    StepDone,
    StepJob,
)
from plait.core.plans import Microbatch, Replica
from plait.core.settings import ClusterSettings, RunSettings
from plait.distributed.fleet import Fleet
from plait.distributed.launch import Launcher
from plait.distributed.places import Place, read_meeting
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.local_worker import LocalWorker
from plait.engine.packer import Packer
from plait.engine.steps import DataOrder, training_batch
from plait_kernels.bank import GRADIENTS, WEIGHTS

STEPS = 4
ALIKE: dict[str, Any] = {}
UNLIKE: dict[str, Any] = {"capacities": (160, 128), "speeds": (2.0, 0.5)}
FOUR: dict[str, Any] = {"capacities": (160, 64, 128, 96), "speeds": (2.0, 0.5, 1.0, 1.0)}


@pytest.mark.parametrize(("count", "cluster"), [(1, ALIKE), (2, UNLIKE), (3, ALIKE), (4, FOUR)])
def test_replicas_train_as_one_process_does(
    laboratory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, cluster: dict[str, Any]
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)
    alone = lab.undisturbed(jobs, kernels="grouped")
    with fleet(count, TINY, ENGINE, tmp_path / "processes", **cluster) as worker:
        run = partial(lab.run, jobs, worker=worker, cluster=ClusterSettings(processes=count, **cluster))
        largest: dict[int, int] = {}
        monkeypatch.setattr(worker, "execute", partial(noting, worker.execute, largest))
        first = run()
        if count in (2, 4):  # with three, other runs are compared to the bit
            assert_same_bits(run(), first, jobs)
    if count == 3:
        with fleet(count, TINY, ENGINE, tmp_path / "sharded", optimiser="sharded") as worker:
            assert_same_bits(run(worker=worker), first, jobs)
    capacities = cluster.get("capacities", [160] * count)
    assert largest.keys() == set(range(count))
    assert all(tokens <= capacities[replica] for replica, tokens in largest.items())
    assert [each.job_tokens for each in first.steps] == [each.job_tokens for each in alone.steps]
    assert_same(first, alone, jobs)


def test_jobs_that_join_finish_and_diverge_leave_the_others_as_they_were(
    laboratory: Any, tmp_path: Path
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)
    jobs[0] = with_train(jobs[0], steps=2)
    huge = with_train(jobs[3], lr=9e15, lora_plus_ratio=9e15, clip_norm=None)
    jobs[3] = replace(huge, adapter=replace(huge.adapter, alpha=9e15))
    late = jobs[4]

    def between(turn: int, coordinator: Coordinator) -> None:
        if turn == 3:
            coordinator.submit(late)

    alone = lab.undisturbed([*jobs[:3], *jobs[4:]], kernels="grouped")
    with fleet(2, TINY, ENGINE, tmp_path / "processes", **UNLIKE) as worker:
        found = lab.run(
            [job for job in jobs if job is not late],
            worker=worker,
            between=between,
            cluster=ClusterSettings(processes=2, **UNLIKE),
        )
    failed = found.ended(jobs[3].name)
    assert (failed.state, failed.step < STEPS) == ("failed", True)
    assert_same(found, alone, [*jobs[:3], *jobs[4:]])


def test_a_process_that_is_lost_and_comes_late_changes_nothing(
    laboratory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=10)[:4]
    alone = lab.undisturbed(jobs, kernels="grouped")
    place = Place(0, 2, 0, 2, "127.0.0.1", f"test-{os.getpid()}")
    cluster = ClusterSettings(processes=2, join_seconds=240.0)
    settings = RunSettings(model=TINY, engine=ENGINE, cluster=cluster)
    with closing(Launcher(cluster, place, start=ForkedProcess)) as launcher:
        meeting = read_meeting(place, cluster)
        assert meeting is not None

        def come() -> ForkedProcess:
            return ForkedProcess(meeting.address, meeting.key, 1, tmp_path / "1.log")

        def together() -> Fleet:
            return launcher.fleet(tmp_path / "logs", settings, DataCatalogue(random_data))

        def between(turn: int, coordinator: Coordinator) -> None:
            now = len(coordinator.plan().replicas)
            counts.append(now)
            if turn == 2:
                os.kill(elsewhere.pid, signal.SIGKILL)
                wait_no_longer(launcher, monkeypatch)
            elif now == 1 and counts.count(1) == 3:
                back.append(come())
                while not launcher.grown():
                    time.sleep(0.01)

        elsewhere, back, counts = come(), list[ForkedProcess](), list[int]()
        found = lab.run(
            jobs, worker=together(), between=between, cluster=cluster, renew=together, grown=launcher.grown
        )
    back[0].wait()
    assert [each for each, _ in groupby(counts)] == [2, 1, 2]
    said = [each.text for each in found.events if isinstance(each, Notice)]
    assert any("2 processes train from now on" in text for text in said)
    for job in jobs:
        progress = (each for each in found.events if isinstance(each, JobProgress))
        losses = {each.step: each.loss for each in progress if each.job == job.name}
        assert list(losses.values()) == pytest.approx(alone.losses(job.name), rel=LOSS_TOLERANCE)
        update = distance(alone.end[job.name], alone.start[job.name])
        assert distance(found.end[job.name], alone.end[job.name]) <= WEIGHT_TOLERANCE * update


def test_interrupted_and_resumed_on_another_number_of_processes(laboratory: Any, tmp_path: Path) -> None:
    """Whether each of them had, and then has, all moments or a part of them."""
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)[:4]
    alone = lab.undisturbed(jobs, kernels="grouped")
    parts: list[History] = []
    resume: dict[str, Path] = {}
    turns = ((2, "repeated", 2), (3, "sharded", 1), (2, "repeated", None))
    for turn, (count, optimiser, stop) in enumerate(turns):
        with fleet(count, TINY, ENGINE, tmp_path / str(turn), optimiser=optimiser) as worker:
            cluster = ClusterSettings(processes=count)
            parts.append(
                lab.run(jobs, worker=worker, resume_from=resume, between=stopping(stop), cluster=cluster)
            )
        resume = parts[-1].checkpoints
    for job in jobs:
        assert [len(part.losses(job.name)) for part in parts] == [2, 1, 1]
    assert_same(reduce(History.before, parts), alone, jobs)


@pytest.mark.parametrize("optimiser", ["repeated", "sharded"])
def test_a_process_that_runs_out_of_memory_makes_room_and_changes_nothing(
    laboratory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimiser: str
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=STEPS)[:4]
    alone = lab.undisturbed(jobs, kernels="grouped")
    monkeypatch.setattr(ForkedProcess, "short_at", {1: 3})
    own = UNLIKE | {"optimiser": optimiser}
    with fleet(2, TINY, ENGINE, tmp_path / "processes", **own) as worker:
        found = lab.run(jobs, worker=worker, cluster=ClusterSettings(processes=2, **own))
    (left,) = (each for each in found.events if isinstance(each, JobPaused))
    assert (left.job, left.reason) == (jobs[3].name, PauseReason.PREEMPTED)
    assert left.step > 0
    assert_same(found, alone, jobs)


class ShortPeers:
    """Peers of which another one runs out of memory in the second round; it notes what was begun."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.asked: list[bool] = []

    def add_up(self, _: Tensor, job: str, step: int) -> None:
        self.begun.append((job, step))

    def fill(self, _: object) -> None:
        raise AssertionError("each has all moments")

    def finish(self, *, short: bool) -> bool:
        self.asked.append(short)
        return short or len(self.asked) == 2


@pytest.mark.parametrize("here", [False, True])
def test_if_one_replica_runs_out_of_memory_none_steps_and_all_recover(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(steps=STEPS)[1:4]
    peers = ShortPeers()
    worker = LocalWorker(lab.model, DataCatalogue(random_data), ENGINE, peers=peers)
    packer = Packer([Replica(capacity=160)])
    for job in jobs:
        worker.execute(Attach(job))

    def schedule(step: int) -> RunSchedule:
        batches = [
            training_batch(job, DataOrder.over(job.train, lab.data(job).train), lab.data(job).train, step)
            for job in jobs
        ]
        return RunSchedule((*packer.pack(batches), *(StepJob(job.name, step, 1e-3) for job in jobs)))

    worker.execute(schedule(1))
    weights = [worker.bank.block(job.name).state[WEIGHTS].clone() for job in jobs]
    if here:
        monkeypatch.setattr(worker, "_forward", out_of_memory)
    events = worker.execute(schedule(2))
    assert any(isinstance(event, OutOfMemory) for event in events)  # with the seconds of the wait
    assert not any(isinstance(event, StepDone) for event in events)
    assert peers.asked == [False, here]
    assert peers.begun == [(job.name, step) for step in (1, 2) for job in jobs]
    for job, before in zip(jobs, weights, strict=True):
        state = worker.bank.block(job.name).state
        assert torch.equal(state[WEIGHTS], before)
        assert not state[GRADIENTS].any()


def test_a_job_s_gradients_are_on_their_way_while_other_jobs_compute(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(steps=STEPS)[1:4]
    peers = ShortPeers()
    worker = LocalWorker(lab.model, DataCatalogue(random_data), ENGINE, peers=peers)
    packer = Packer([Replica(capacity=160)])
    microbatches: list[Microbatch] = []
    for job in jobs:
        worker.execute(Attach(job))
        split = lab.data(job).train
        microbatches += packer.pack([training_batch(job, DataOrder.over(job.train, split), split, 1)])
    seen: list[int] = []
    forward = worker._forward

    def watched(*given: Any) -> Any:
        seen.append(len(peers.begun))
        return forward(*given)

    monkeypatch.setattr(worker, "_forward", watched)
    worker.execute(RunSchedule((*microbatches, *(StepJob(job.name, 1, 1e-3) for job in jobs))))
    owners = [each.segments[0].job for each in microbatches]
    assert len(microbatches) > len(jobs)
    assert seen == [len(set(owners[:place]) - set(owners[place:])) for place in range(len(owners))]
    assert max(seen) == len(jobs) - 1
    assert len(peers.begun) == len(jobs)


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


def noting(execute: Any, largest: dict[int, int], command: Any) -> Any:
    """Carry out a command, and note the largest microbatch of each replica."""
    if isinstance(command, RunSchedule):
        for each in command.microbatches:
            largest[each.replica] = max(each.tokens, largest.get(each.replica, 0))
    return execute(command)

"""Promise 1: an adapter trained in a group ends where it would have ended alone, and where PEFT ends.

Float32, 20 steps (fewer where another case takes 20), seven adapters that differ in rank
(1, 2, 3, 5, 8, 16, 64), alpha, targets, batch size, accumulation, learning rate, LoRA+ ratio, schedule, clip,
weight decay, lengths and seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laboratory import ENGINE, TINY, Laboratory, Weights, assert_same, distance
from peft_runs import PeftRun, assert_same_as_peft, peft_run
from processes import fleet

from plait.core.jobs import JobSpec
from plait.core.settings import ClusterSettings

STEPS = 20


@pytest.mark.parametrize(
    ("family", "kernels", "dropout", "steps"),
    [
        ("llama", "reference", 0.1, 4),
        ("llama", "grouped", 0.1, STEPS),
        ("gemma2", "grouped", 0.1, 6),
        ("gpt2", "grouped", 0.1, 6),
    ],
)
def test_joint_equals_solo(laboratory: Any, family: str, kernels: str, dropout: float, steps: int) -> None:
    lab = laboratory(family)
    jobs = lab.group(dropout=dropout, steps=steps)
    joint = lab.undisturbed(jobs, kernels=kernels)
    for job in jobs:
        assert_same(joint, lab.undisturbed([job], kernels=kernels), [job])


@pytest.fixture(scope="module")
def trained_by_peft() -> Callable[[Laboratory, JobSpec, Weights], PeftRun]:
    """What PEFT makes of a job, once for all that compare with it."""
    known: dict[tuple[str, JobSpec], PeftRun] = {}

    def train(lab: Laboratory, job: JobSpec, start: Weights) -> PeftRun:
        if (lab.family, job) not in known:
            known[lab.family, job] = peft_run(lab, job, start)
        found = known[lab.family, job]
        assert distance(found.start, start) == 0.0
        return found

    return train


@pytest.mark.parametrize(
    ("family", "backends", "steps"),
    [("llama", ("grouped",), STEPS), ("gemma2", ("grouped",), 8), ("gpt2", ("reference", "grouped"), 8)],
)
def test_joint_equals_peft(
    laboratory: Any, trained_by_peft: Any, family: str, backends: tuple[str, ...], steps: int
) -> None:
    lab = laboratory(family)
    jobs = lab.group(steps=steps)
    runs = [lab.undisturbed(jobs, kernels=kernels) for kernels in backends]
    for job in jobs:
        alone = trained_by_peft(lab, job, runs[-1].start[job.name])
        for joint in runs:
            assert_same_as_peft(joint, alone)


def test_replicas_train_as_peft(laboratory: Any, trained_by_peft: Any, tmp_path: Path) -> None:
    lab = laboratory("gpt2")
    jobs = lab.group(steps=8)
    unlike: dict[str, Any] = {"capacities": (160, 128), "speeds": (2.0, 0.5)}
    with fleet(2, replace(TINY, family="gpt2"), ENGINE, tmp_path / "processes", **unlike) as worker:
        found = lab.run(jobs, worker=worker, cluster=ClusterSettings(processes=2, **unlike))
    start = lab.undisturbed(jobs, kernels="grouped").start
    for job in jobs:
        assert_same_as_peft(found, trained_by_peft(lab, job, start[job.name]))

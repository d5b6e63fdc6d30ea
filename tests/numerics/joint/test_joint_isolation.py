"""Promises 3 and 4: equal runs are bit-equal, and nothing that happens to one job reaches another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from laboratory import assert_same, assert_same_bits, distance, with_train

from plait.core.messages import RunSchedule

KERNELS = ("reference", "grouped")
STEPS = 4


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_runs_of_one_plan_are_bit_equal(laboratory: Any, checkpointing: bool) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=4)
    options = {"kernels": "grouped"} | ({"checkpointing": True} if checkpointing else {})
    first, second = lab.undisturbed(jobs, **options), lab.run(jobs, **options)
    assert_same_bits(first, second, jobs)


@pytest.mark.parametrize("kernels", KERNELS)
def test_recomputing_activations_changes_nothing(laboratory: Any, kernels: str) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=2)[:4]
    kept = lab.run(jobs, kernels=kernels)
    recomputed = lab.run(jobs, kernels=kernels, checkpointing=True)
    for job in jobs:
        assert kept.losses(job.name) == recomputed.losses(job.name)
        update = distance(kept.end[job.name], kept.start[job.name])
        assert distance(kept.end[job.name], recomputed.end[job.name]) <= 1e-6 * update


@pytest.mark.parametrize("kernels", KERNELS)
def test_weights_that_become_nan_end_their_job_only(laboratory: Any, kernels: str) -> None:
    lab = laboratory("llama")
    jobs = lab.group(steps=STEPS)
    bad = jobs[2].name

    def poison(worker: Any, command: object) -> None:
        if isinstance(command, RunSchedule) and command.microbatches[0].segments[0].step == 3:
            a, _ = next(iter(worker.bank.weights(bad).values()))
            a[0, 0] = float("nan")
            worker.bank.refresh([bad])

    together = lab.run(jobs, kernels=kernels, before=poison)
    assert (together.ended(bad).state, together.ended(bad).step) == ("failed", 2)
    assert "nan" in together.ended(bad).reason
    for job in jobs:
        if job.name != bad:
            assert_same(together, lab.undisturbed([job], kernels=kernels), [job])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_job_that_diverges_ends_alone(laboratory: Any, kernels: str) -> None:
    """Float32 overflows after one step: infinities and NaN go through every layer."""
    lab = laboratory("llama")
    jobs = lab.group(steps=STEPS)
    huge = with_train(jobs[3], lr=9e15, lora_plus_ratio=9e15, clip_norm=None)
    jobs[3] = replace(huge, adapter=replace(huge.adapter, alpha=9e15))
    together = lab.run(jobs, kernels=kernels)
    failed = together.ended(jobs[3].name)
    assert failed.state == "failed"
    assert failed.step < STEPS
    for job in (*jobs[:3], *jobs[4:]):
        assert_same(together, lab.undisturbed([job], kernels=kernels), [job])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_gradient_that_is_not_finite_fails_the_step_and_leaves_the_others_exact(
    laboratory: Any, kernels: str
) -> None:
    lab = laboratory("llama")
    jobs = lab.group(steps=4)
    bad = jobs[0].name

    def poison(worker: Any, command: object) -> None:
        if isinstance(command, RunSchedule) and command.steps[0].step == 3:
            _, b = next(iter(worker.bank.gradients(bad).values()))
            b[0, 0] = float("inf")

    together = lab.run(jobs, kernels=kernels, before=poison)
    assert (together.ended(bad).state, together.ended(bad).step) == ("failed", 2)
    assert "gradient norm is inf" in together.ended(bad).reason
    clean = lab.undisturbed(jobs, kernels=kernels)
    for job in jobs[1:]:
        assert together.losses(job.name)[:3] == clean.losses(job.name)[:3]
        assert_same(together, clean, [job])


@pytest.mark.parametrize("kernels", KERNELS)
def test_jobs_that_finish_join_or_are_cancelled_do_not_affect_others(laboratory: Any, kernels: str) -> None:
    lab = laboratory("llama")
    jobs = lab.group(steps=STEPS)
    jobs[0] = with_train(jobs[0], steps=3)  # ends early
    late, dropped = jobs[4], jobs[5]

    def between(turn: int, coordinator: Any) -> None:
        if turn == 2:
            coordinator.submit(late)
            coordinator.cancel(dropped.name, "pruned")

    together = lab.run([job for job in jobs if job is not late], kernels=kernels, between=between)
    assert (together.ended(dropped.name).state, together.ended(dropped.name).step) == ("stopped", 2)
    for job in jobs:
        if job is not dropped:
            assert_same(together, lab.undisturbed([job], kernels=kernels), [job])


@pytest.mark.parametrize("capacity", [121, 1000])
def test_how_it_is_packed_does_not_matter(laboratory: Any, capacity: int) -> None:
    lab = laboratory("llama")
    jobs = lab.group(dropout=0.1, steps=4)
    here = lab.run(jobs, kernels="grouped", capacity=capacity)
    there = lab.undisturbed(jobs, kernels="grouped")
    assert_same(here, there, jobs)

"""Promise 1: an adapter trained in a group ends where it would have ended alone, and where PEFT ends.

Float32, 20 steps (fewer where another case takes 20), seven adapters that differ in rank
(1, 2, 3, 5, 8, 16, 64), alpha, targets, batch size, accumulation, learning rate, LoRA+ ratio, schedule, clip,
weight decay, lengths and seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft_runs import PeftRun

from plait.core.settings import ModelSettings
from plait.models.load import transformers_model
from plait.models.targets import resolve_targets

STEPS = 20
LOSS_TOLERANCE = 1e-5  # relative, every step
WEIGHT_TOLERANCE = 1e-4  # of the norm of the adapter's update


def assert_same_losses(found: list[float], expected: list[float], what: str) -> None:
    assert len(found) == len(expected) > 0
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= LOSS_TOLERANCE, f"{what}: a loss differs by {worst:.1e}"


@pytest.mark.parametrize(
    ("family", "kernels", "dropout", "steps"),
    [
        ("llama", "reference", 0.1, 4),
        ("llama", "grouped", 0.0, 6),
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
        solo = lab.undisturbed([job], kernels=kernels)
        assert len(joint.losses(job.name)) == steps
        assert_same_losses(joint.losses(job.name), solo.losses(job.name), job.name)
        assert joint.evaluations(job.name) == pytest.approx(solo.evaluations(job.name), rel=LOSS_TOLERANCE)
        assert joint.difference(solo, job.name) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    ("family", "backends", "steps"),
    [("llama", ("reference", "grouped"), STEPS), ("gemma2", ("grouped",), 8), ("gpt2", ("grouped",), 8)],
)
def test_joint_equals_peft(
    laboratory: Any, family: str, backends: tuple[str, ...], steps: int, tmp_path: Path
) -> None:
    lab = laboratory(family)
    jobs = lab.group(steps=steps)
    runs = {kernels: lab.undisturbed(jobs, kernels=kernels) for kernels in backends}
    for job in jobs:
        base = transformers_model(
            ModelSettings(kind="tiny", family=family, dtype="float32", seed=3), cache=tmp_path
        )
        alone = PeftRun(base, job, resolve_targets(job.adapter.target_modules, lab.model.linears))
        alone.load(runs["grouped"].start[job.name])
        losses = alone.train(lab.data(job).train)
        for kernels, joint in runs.items():
            assert len(losses) == steps
            assert_same_losses(joint.losses(job.name), losses, f"{family}, {kernels}, {job.name}")
            # AdamW divides by the gradients' size: losses and weights hardly show it.
            assert joint.norms(job.name) == pytest.approx(alone.norms, rel=LOSS_TOLERANCE)
            assert joint.difference_from(alone.weights(), job.name) <= WEIGHT_TOLERANCE

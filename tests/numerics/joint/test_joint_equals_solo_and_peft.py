"""Promise 1: an adapter trained in a group ends where it would have ended alone, and where PEFT ends.

Float32, 20 steps (fewer where another case takes 20), seven adapters that differ in rank
(1, 2, 3, 5, 8, 16, 64), alpha, targets, batch size, accumulation, learning rate, LoRA+ ratio, schedule, clip,
weight decay, lengths and seed.
"""

from __future__ import annotations

from typing import Any

import pytest
from laboratory import assert_same
from peft_runs import assert_same_as_peft, peft_run

STEPS = 20


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
        assert_same(joint, lab.undisturbed([job], kernels=kernels), [job])


@pytest.mark.parametrize(
    ("family", "backends", "steps"),
    [("llama", ("reference", "grouped"), STEPS), ("gemma2", ("grouped",), 8), ("gpt2", ("grouped",), 8)],
)
def test_joint_equals_peft(laboratory: Any, family: str, backends: tuple[str, ...], steps: int) -> None:
    lab = laboratory(family)
    jobs = lab.group(steps=steps)
    runs = [lab.undisturbed(jobs, kernels=kernels) for kernels in backends]
    for job in jobs:
        alone = peft_run(lab, job, runs[-1].start[job.name])
        for joint in runs:
            assert_same_as_peft(joint, alone)

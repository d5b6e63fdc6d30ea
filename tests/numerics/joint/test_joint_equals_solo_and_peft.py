"""Promise 1: an adapter trained in a group ends where it would have ended alone, and where PEFT ends.

Float32, 20 steps, seven adapters that differ in rank (1, 2, 3, 5, 8, 16, 64), alpha, targets, batch size,
accumulation, learning rate, LoRA+ ratio, schedule, clip, weight decay, lengths and seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from plait.core.jobs import JobSpec
from plait.core.samples import Split
from plait.core.settings import ModelSettings
from plait.engine.steps import DataOrder, learning_rate
from plait.models.load import transformers_model
from plait.models.targets import resolve_targets

STEPS = 20
LOSS_TOLERANCE = 1e-5  # relative, every step
WEIGHT_TOLERANCE = 1e-4  # of the norm of the adapter's update


def assert_same_losses(found: list[float], expected: list[float], what: str) -> None:
    assert len(found) == len(expected) == STEPS
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= LOSS_TOLERANCE, f"{what}: a loss differs by {worst:.1e}"


@pytest.mark.parametrize(
    ("family", "kernels", "dropout"),
    [
        ("llama", "reference", 0.0),
        pytest.param("llama", "reference", 0.1, marks=pytest.mark.slow),
        ("llama", "grouped", 0.0),
        ("llama", "grouped", 0.1),
        ("gemma2", "grouped", 0.1),
        ("gpt2", "grouped", 0.1),
    ],
)
def test_joint_equals_solo(laboratory: Any, family: str, kernels: str, dropout: float) -> None:
    lab = laboratory(family)
    jobs = lab.group(dropout=dropout)
    joint = lab.run(jobs, kernels=kernels)
    for job in jobs:
        solo = lab.run([job], kernels=kernels)
        assert_same_losses(joint.losses(job.name), solo.losses(job.name), job.name)
        assert joint.evaluations(job.name) == pytest.approx(solo.evaluations(job.name), rel=LOSS_TOLERANCE)
        assert joint.difference(solo, job.name) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_joint_equals_peft(laboratory: Any, family: str, tmp_path: Path) -> None:
    lab = laboratory(family)
    jobs = lab.group()
    runs = {kernels: lab.run(jobs, kernels=kernels) for kernels in ("reference", "grouped")}
    for job in jobs:
        alone = PeftRun(family, job, resolve_targets(job.adapter.target_modules, lab.model.linears), tmp_path)
        alone.load(runs["grouped"].start[job.name])
        losses = alone.train(lab.data(job).train)
        for kernels, joint in runs.items():
            assert_same_losses(joint.losses(job.name), losses, f"{family}, {kernels}, {job.name}")
            assert joint.difference_from(alone.weights(), job.name) <= WEIGHT_TOLERANCE


class PeftRun:
    """One job trained by transformers and PEFT, one sample at a time."""

    def __init__(self, family: str, job: JobSpec, targets: tuple[str, ...], folder: Path) -> None:
        settings = ModelSettings(kind="tiny", family=family, dtype="float32", seed=3)
        base = transformers_model(settings, cache=folder)
        base.set_attn_implementation("eager")  # sdpa leaves Gemma 2's softcap out
        config = peft.LoraConfig(
            r=job.adapter.rank,
            lora_alpha=job.adapter.alpha,
            target_modules=list(targets),
            use_rslora=job.adapter.rslora,
            fan_in_fan_out=family == "gpt2",
            task_type="CAUSAL_LM",
        )
        self.model = peft.get_peft_model(base, config)
        self.job = job

    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        named = dict(self.model.named_parameters())
        sites = [name.removesuffix(".lora_A.default.weight") for name in named if "lora_A" in name]
        kinds = ("lora_A", "lora_B")
        return {
            site.removeprefix("base_model.model."): tuple(
                named[f"{site}.{kind}.default.weight"].detach() for kind in kinds
            )
            for site in sites
        }

    def load(self, start: dict[str, tuple[Tensor, Tensor]]) -> None:
        assert self.weights().keys() == start.keys()
        for site, pair in self.weights().items():
            for mine, given in zip(pair, start[site], strict=True):
                mine.copy_(given)

    def train(self, split: Split) -> list[float]:
        train = self.job.train
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        of_kind = [[p for name, p in named if kind in name] for kind in ("lora_A", "lora_B")]
        optimiser = torch.optim.AdamW(
            [{"params": of_kind[0]}, {"params": of_kind[1]}],
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        order = DataOrder.of(train, len(split))
        losses = []
        for step in range(1, STEPS + 1):
            losses.append(self.backward(split, order.at(step)[0]))
            rate = learning_rate(train, step, STEPS)
            optimiser.param_groups[0]["lr"] = rate
            optimiser.param_groups[1]["lr"] = rate * train.lora_plus_ratio
            if train.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for _, p in named], train.clip_norm)
            optimiser.step()
            optimiser.zero_grad()
        return losses

    def backward(self, split: Split, samples: tuple[int, ...]) -> float:
        """Gradients of the mean over the labelled tokens of the global batch; returns that mean."""
        labelled = sum(int(split[sample].labels.sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            tokens = torch.from_numpy(split[sample].tokens).long()
            chosen = torch.from_numpy(split[sample].labels)[1:]
            logits = self.model(tokens.unsqueeze(0), use_cache=False).logits[0]
            loss = cross_entropy(logits[:-1][chosen], tokens[1:][chosen], reduction="sum") / labelled
            loss.backward()
            total += loss.item()
        return total

"""The other side of joint = solo = PEFT: one job trained by transformers and PEFT, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import peft
import pytest
import torch
from laboratory import LOSS_TOLERANCE, TINY, WEIGHT_TOLERANCE, History, Laboratory, Weights, distance
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from plait.core.jobs import JobSpec
from plait.core.samples import Split
from plait.engine.steps import DataOrder, learning_rate
from plait.models.load import transformers_model
from plait.models.targets import resolve_targets


class PeftRun:
    """One job on a plain base model, which becomes PEFT's.

    Args:
        targets: names of the layers, or "all-linear".

    Attributes:
        start: what :meth:`load` was given.
        losses: of each step.
        norms: of the gradients of each step, before they are clipped.
    """

    def __init__(self, base: PreTrainedModel, job: JobSpec, targets: Sequence[str] | str) -> None:
        base.set_attn_implementation("eager")  # sdpa leaves Gemma 2's softcap out
        config = peft.LoraConfig(
            r=job.adapter.rank,
            lora_alpha=job.adapter.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=job.adapter.rslora,
            fan_in_fan_out="GPT2" in type(base).__name__,
            task_type="CAUSAL_LM",
        )
        self.model = peft.get_peft_model(base, config)
        self.job = job
        self.start: Weights = {}
        self.losses: list[float] = []
        self.norms: list[float] = []

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

    def load(self, start: Weights) -> None:
        assert self.weights().keys() == start.keys()
        for site, pair in self.weights().items():
            for mine, given in zip(pair, start[site], strict=True):
                mine.copy_(given)
        self.start = start

    def train(self, split: Split) -> PeftRun:
        """Take every step of the job's budget."""
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
        for step in range(1, order.steps + 1):
            self.losses.append(self.backward(split, order.at(step)[0]))
            rate = learning_rate(train, step, order.steps)
            optimiser.param_groups[0]["lr"] = rate
            optimiser.param_groups[1]["lr"] = rate * train.lora_plus_ratio
            most = float("inf") if train.clip_norm is None else train.clip_norm
            self.norms.append(torch.nn.utils.clip_grad_norm_([p for _, p in named], most).item())
            optimiser.step()
            optimiser.zero_grad()
        return self

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


def peft_run(lab: Laboratory, job: JobSpec, start: Weights) -> PeftRun:
    """A job of a laboratory, trained by PEFT from these weights."""
    settings = replace(TINY, family=lab.family, quantise=lab.model.identity.quantise)
    targets = resolve_targets(job.adapter.target_modules, lab.model.linears)
    run = PeftRun(transformers_model(settings, cache=lab.folder), job, targets)
    run.load(start)
    return run.train(lab.data(job).train)


def assert_same_as_peft(found: History, alone: PeftRun) -> None:
    """Promise 1: a job has the losses, norms and weights that PEFT comes to, within rounding."""
    name, weights = alone.job.name, alone.weights()
    assert len(found.losses(name)) == alone.job.train.steps
    assert found.losses(name) == pytest.approx(alone.losses, rel=LOSS_TOLERANCE)
    # AdamW divides by the gradients' size: losses and weights hardly show it.
    assert found.norms(name) == pytest.approx(alone.norms, rel=LOSS_TOLERANCE)
    update = distance(weights, alone.start)
    assert distance(found.end[name], weights) <= WEIGHT_TOLERANCE * update

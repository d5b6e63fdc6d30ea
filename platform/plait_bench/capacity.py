"""How fast the frozen model alone goes, and the joint step beside it, by tokens of a microbatch.

The frozen model's forward and backward pass over the same packed samples is the limit of joint training:
what lies between the two is what the adapters cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter

import numpy as np
import torch

from plait.core.figures import Figure
from plait.core.jobs import JobSpec
from plait.core.plans import Microbatch
from plait.core.samples import Sample
from plait.models import BaseModel, MicrobatchContext
from plait.utils.progress import part
from plait_bench.joint_side import JointSide
from plait_kernels import labelled_cross_entropy

CAPACITIES = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """Real tokens a second at one capacity: medians over the rounds."""

    capacity: int
    frozen: float
    joint: float


def measure_capacities(
    side: JointSide, base: BaseModel, jobs: Sequence[JobSpec], capacities: Sequence[int], rounds: int
) -> list[CapacityPoint]:
    """Forward and backward over one global batch of every job, at each capacity in turn, ``rounds`` times.

    Capacities that some sample does not fit into are left out.
    """
    longest = max(length for job in jobs for length in side.batch(job, 1).lengths)
    plans = {capacity: side.pack(jobs, 1, capacity) for capacity in capacities if capacity >= longest}
    tokens = sum(sum(side.batch(job, 1).lengths) for job in jobs)
    for job in jobs:
        side.attach(job)
    frozen = {capacity: [_samples(side, jobs, each) for each in plan] for capacity, plan in plans.items()}
    seconds: dict[int, list[tuple[float, float]]] = {capacity: [] for capacity in plans}
    piece = part("frozen model and joint step by capacity", (rounds + 1) * len(plans))
    for round_ in range(rounds + 1):
        for capacity, plan in plans.items():
            piece(f"{capacity} tokens, {f'round {round_}' if round_ else 'a warm-up'}")
            started = perf_counter()
            for samples in frozen[capacity]:
                _frozen_pass(base, samples)
            between = perf_counter()
            side.pass_through(plan)
            seconds[capacity].append((between - started, perf_counter() - between))
    for job in jobs:
        side.detach(job)
    points = []
    for capacity, rounds_of in seconds.items():
        alone, joint = (
            tokens / median(kind) for kind in zip(*rounds_of[1:], strict=True)
        )  # the first warms up
        points.append(CapacityPoint(capacity, alone, joint))
    return points


def capacity_figures(points: Sequence[CapacityPoint]) -> list[Figure]:
    """Two lines for each capacity, and how near the best joint rate comes to the best frozen one."""
    figures = []
    for point in points:
        name = f"capacity {point.capacity}"
        figures.append(Figure(f"{name}: frozen model alone", point.frozen, "tokens/s", "measured"))
        figures.append(
            Figure(
                f"{name}: joint forward and backward",
                point.joint,
                "tokens/s",
                "measured",
                note=f"{point.joint / point.frozen:.0%} of the frozen model",
            )
        )
    return figures


def _samples(side: JointSide, jobs: Sequence[JobSpec], microbatch: Microbatch) -> list[Sample]:
    splits = {job.name: side.split(job) for job in jobs}
    return [splits[segment.job][index] for segment in microbatch.segments for index in segment.samples]


def _frozen_pass(base: BaseModel, samples: Sequence[Sample]) -> None:
    """Forward, loss at the labelled rows, and the gradient back to the embeddings; no adapter."""
    token_ids = torch.from_numpy(np.concatenate([sample.tokens for sample in samples])).long()
    labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples]))
    offsets = [0, *accumulate(len(sample.tokens) for sample in samples)]
    context = MicrobatchContext.of(token_ids.to(base.device), offsets)
    hidden = start = base.embed(context).requires_grad_()
    for index in range(base.layer_count):
        hidden = base.layer(index, hidden, context)
    labelled = labels.nonzero()[:, 0].to(base.device)
    head = base.head_parameters()
    loss, _ = labelled_cross_entropy(
        base.final_norm(hidden[labelled - 1]),
        head.weight,
        head.bias,
        context.token_ids[labelled],
        torch.full((len(labelled),), 1.0 / len(labelled), device=base.device),
        softcap=head.softcap,
        scale=head.scale,
    )
    torch.autograd.backward(loss)
    start.grad = None

"""The limit of joint training: the frozen model's own pass forward and back over the same microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from time import perf_counter

import numpy as np
import torch

from plait.core.jobs import JobSpec
from plait.core.samples import Sample
from plait.models.base import BaseModel
from plait.models.context import MicrobatchContext
from plait_bench.figures import Baseline, Figure
from plait_bench.joint_side import JointSide
from plait_bench.progress import part


def limit_figures(side: JointSide, base: BaseModel, jobs: Sequence[JobSpec], rounds: int) -> list[Figure]:
    """Real tokens a second of the frozen model and, beside it, of the joint pass: medians of ``rounds``.

    Both go, in turns, over one global batch of every job. What lies between them is what adapters cost.
    """
    plan = side.pack(jobs, 1, side.settings.engine.capacity_or_usual)
    splits = {job.name: side.split(job) for job in jobs}
    samples = [
        [splits[segment.job][index] for segment in microbatch.segments for index in segment.samples]
        for microbatch in plan
    ]
    tokens = sum(len(sample.tokens) for each in samples for sample in each)
    seconds: list[tuple[float, float]] = []
    piece = part("frozen model and joint pass in turns", rounds + 1)
    with side.attached(jobs):
        for number in range(rounds + 1):
            piece(f"round {number}" if number else "a warm-up")
            started = perf_counter()
            for each in samples:
                _frozen_pass(base, each)
            between = perf_counter()
            side.pass_through(plan)
            seconds.append((between - started, perf_counter() - between))
    frozen, joint = (tokens / median(kind) for kind in zip(*seconds[1:], strict=True))
    alone = Baseline(frozen, "the frozen model alone: the upper limit")
    return [
        Figure("frozen model alone", frozen, "tokens/s", "measured"),
        Figure("joint forward and backward", joint, "tokens/s", "measured", alone),
    ]


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
    weights = torch.full((len(labelled),), 1.0 / len(labelled), device=base.device)
    loss, _ = base.loss(hidden, labelled - 1, context.token_ids[labelled], weights)
    torch.autograd.backward(loss)
    start.grad = None

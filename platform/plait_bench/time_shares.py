"""Where the time of a joint step goes, by operation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch.profiler import ProfilerActivity, profile

from plait.core.figures import Figure
from plait.core.jobs import JobSpec
from plait.utils.progress import part
from plait_bench.joint_side import JointSide

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
SHOWN = 5  # operations named beside the products
SILENT = "6"  # above USDT, the level at which Kineto tells that a profile starts and stops


def time_shares(side: JointSide, jobs: Sequence[JobSpec]) -> dict[str, float]:
    """Each operation's own share of the processor time of one joint step, its callees left out.

    The profiler itself slows small operations most, so their shares are upper bounds.
    """
    part("where the time of a joint step goes")
    microbatches = side.pack(jobs, 1, side.settings.engine.capacity_or_usual)
    for job in jobs:
        side.attach(job)
    side.pass_through(microbatches)
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)  # read when the first profile begins
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        side.pass_through(microbatches)
        side.step(jobs, 1)
    for job in jobs:
        side.detach(job)
    spent = {event.key: float(event.self_cpu_time_total) for event in profiler.key_averages()}
    return {name: time / sum(spent.values()) for name, time in spent.items()}


def share_figures(shares: Mapping[str, float]) -> list[Figure]:
    """The matrix products together, the largest other operations, and what is left."""
    products = sum(share for name, share in shares.items() if name in PRODUCTS)
    others = {name: share for name, share in shares.items() if name not in PRODUCTS}
    largest = sorted(others, key=lambda name: -others[name])[:SHOWN]
    named = {"matrix products": products, **{name: others.pop(name) for name in largest}, "all else": 0.0}
    named["all else"] = sum(others.values())
    return [
        Figure(f"of a joint step: {name}", 100 * share, "%", "measured", note="of processor time")
        for name, share in named.items()
    ]

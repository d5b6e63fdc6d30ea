"""Pipelines in 1F1B order that sum gradients between replicas with collectives which stages wait for.

In the simulator a stage works on while gradients are summed. Here each stage, after its last backward of a
step, waits until the same stage of all replicas has come as far: data parallelism as other systems have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import TopologicalSorter

from plait.simulate.events import Key, OneFOneB, Pipeline

Node = tuple[
    str, int, int, Key | int
]  # "forward" or "backward", replica, stage, work; or "sum", 0, stage, step


def blocking_seconds(pipelines: Mapping[int, Pipeline], groups: Mapping[str, str]) -> float:
    """Seconds until all stages have ended.

    Args:
        groups: by job, the name of the group that it steps with.
    """
    before, seconds = defaultdict[Node, set[Node]](set), dict[Node, float]()
    for replica, pipeline in pipelines.items():
        parts = [{(groups[job], step) for job, step in work.parts} for work in pipeline.works]
        last = {key: place for place, keys in enumerate(parts) for key in keys}
        for stage in range(pipeline.stages):
            _add_stage(before, seconds, replica, stage, pipeline, parts, last)
    ends: dict[Node, float] = {}
    for node in TopologicalSorter(before).static_order():
        ends[node] = seconds.get(node, 0.0) + max((ends[each] for each in before.get(node, ())), default=0.0)
    return max(ends.values(), default=0.0)


def _add_stage(
    before: dict[Node, set[Node]],
    seconds: dict[Node, float],
    replica: int,
    stage: int,
    pipeline: Pipeline,
    parts: list[set[Key]],
    last: Mapping[Key, int],
) -> None:
    """Add the forwards and backwards of one stage, and what each of them needs first."""
    waits: set[Node] = set()
    for kind, work in OneFOneB([len(pipeline.works)]).actions(stage, pipeline.stages):
        node: Node = (kind, replica, stage, work)
        took = pipeline.seconds[stage][work]
        seconds[node] = took.forward if kind == "forward" else took.backward
        before[node] |= waits
        neighbour = stage - 1 if kind == "forward" else stage + 1
        if 0 <= neighbour < pipeline.stages:
            before[node].add((kind, replica, neighbour, work))
        waits = {node}
        if kind == "forward" and stage == 0:
            steps = {(group, step - 1) for group, step in parts[work]}
            before[node] |= {("sum", 0, 0, each) for each in steps & last.keys()}
        if kind == "backward":
            for key in parts[work]:
                if last[key] == work:
                    before["sum", 0, stage, key].add(node)
                    waits.add(("sum", 0, stage, key))

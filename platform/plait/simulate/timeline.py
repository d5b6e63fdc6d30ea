"""A run as a Chrome trace: opens in Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plait.simulate.events import Pipeline, Run

MICROSECONDS = 1_000_000


def chrome_trace(run: Run, pipelines: Mapping[int, Pipeline]) -> str:
    """The run as trace-event JSON: a process for each replica, a thread for each stage.

    Forwards and backwards are complete events; each optimiser step is an instant on its replicas' first
    stage. Times are microseconds. Numbers start at 1: viewers take process and thread 0 for the idle one.
    """
    events = [*_names(pipelines)]
    for span in run.spans:
        work = pipelines[span.replica].works[span.work]
        parts = ", ".join(f"{job}#{step}" for job, step in work.parts) or "no-op"
        events.append(
            {
                "name": f"{span.kind} {span.work}: {parts}",
                "cat": span.kind,
                "ph": "X",
                "pid": span.replica + 1,
                "tid": span.stage + 1,
                "ts": span.start * MICROSECONDS,
                "dur": (span.end - span.start) * MICROSECONDS,
                "args": {"microbatch": span.work, "tokens": work.tokens, "segments": parts},
            }
        )
    events += [
        {
            "name": f"step {job}#{step}",
            "cat": "step",
            "ph": "i",
            "s": "t",
            "pid": replica + 1,
            "tid": 1,
            "ts": seconds * MICROSECONDS,
        }
        for (job, step), seconds in run.steps.items()
        for replica in pipelines
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(pipelines: Mapping[int, Pipeline]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for replica, pipeline in pipelines.items():
        events.append(_name("process_name", replica, 0, f"replica {replica}"))
        events += [_name("thread_name", replica, s, f"stage {s}") for s in range(pipeline.stages)]
    return events


def _name(kind: str, replica: int, stage: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": replica + 1, "tid": stage + 1, "args": {"name": name}}

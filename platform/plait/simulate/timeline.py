"""Shows a simulated run as a Chrome trace, for Perfetto and chrome://tracing.

A seam: it knows runs alone, and neither plans nor the command that writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.simulate.events import Pipeline, Run
from plait.utils.trace_events import TraceEvents


def chrome_trace(run: Run, pipelines: Mapping[int, Pipeline]) -> str:
    """The run as trace-event JSON: a process for each replica, a thread for each stage.

    Forwards and backwards are complete events; each optimiser step is an instant on its replicas' first
    stage.
    """
    events = TraceEvents()
    for replica, pipeline in pipelines.items():
        events.name_process(replica + 1, f"replica {replica}")
        for stage in range(pipeline.stages):
            events.name_thread(replica + 1, stage + 1, f"stage {stage}")
    for span in run.spans:
        work = pipelines[span.replica].works[span.work]
        parts = ", ".join(f"{job}#{step}" for job, step in work.parts) or "no-op"
        events.span(
            f"{span.kind} {span.work}: {parts}",
            span.kind,
            (span.replica + 1, span.stage + 1),
            span.start,
            span.end,
            {"microbatch": span.work, "tokens": work.tokens, "segments": parts},
        )
    for (job, step), seconds in run.steps.items():
        for replica in pipelines:
            events.instant(f"step {job}#{step}", "step", (replica + 1, 1), seconds)
    return events.text()

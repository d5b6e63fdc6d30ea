"""What LoRAFusion's schedules add, measured: stages sleep for the time of each microbatch by the cost model.

All seconds are shortened by one factor. Everything else is real: lists of instructions, messages and the loop
that carries them out, in a process for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.jobs import JobSpec
from plait.core.plans import Microbatch, Segment
from plait.core.settings import RunSettings
from plait.cost.time import StageTime
from plait.simulate.events import Pipeline, Work, simulate
from plait.simulate.lowering import lower
from plait.simulate.orders import OrderName
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Figure, Report
from plait_bench.lorafusion import Options, opened
from plait_bench.lorafusion_steps import pipelines_of
from plait_bench.order_cases import Case, OrderOptions, waiting_share
from plait_bench.order_processes import Setting, spans_of
from plait_bench.pipeline_orders import makespan_and_waiting

LONGEST = 20.0  # seconds of 1F1B, to which all are shortened
SYSTEMS: dict[str, OrderName] = {  # the names of what they are by, with the order that is nearest
    "1F1B": "sequential",
    "jobs in turn": "1f1b",
    "balanced": "lorafusion",
    "Plait": "plait",
}


def case_of(name: OrderName, pipeline: Pipeline, adapters: int, factor: float) -> Case:
    """What is simulated, as processes can run it in ``factor`` times its seconds."""
    microbatches = tuple(_microbatch(place, work) for place, work in enumerate(pipeline.works))
    lists = lower(microbatches, pipeline.stages, pipeline.order, pipeline.seconds)
    return Case(
        name,
        pipeline.stages,
        adapters,
        microbatches,
        tuple(map(tuple, lists)),
        seconds=tuple(
            tuple(StageTime(factor * each.forward, factor * each.backward) for each in own)
            for own in pipeline.seconds
        ),
    )


def _microbatch(place: int, work: Work) -> Microbatch:
    """Segments of equal lengths: only the sum is sent."""
    length, more = divmod(work.tokens, max(1, len(work.parts)))
    return Microbatch(
        0,
        place,
        tuple(
            Segment(job, step, (0,), (0,), (length + more * (number == 0),), 1.0)
            for number, (job, step) in enumerate(work.parts)
        ),
    )


@benchmark("lorafusion/breakdown_measured", Options)
def breakdown(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Tokens a second over 1F1B's, and waiting shares: measured, simulated and published.

    Raises:
        ConfigError: no described cluster.
        LostProcessError: a process died or hangs.
    """
    begun = opened(settings, asked)
    trace = {job: own[: asked.steps] for job, own in begun.trace.items()}
    pipelines = pipelines_of(begun, trace)
    runs = [simulate({0: each}) for each in pipelines]
    factor = LONGEST / runs[0].makespan
    cases = [
        case_of(order, each, asked.adapters, factor)
        for order, each in zip(SYSTEMS.values(), pipelines, strict=True)
    ]
    most = max(each.tokens for case in cases for each in case.microbatches)
    _, *spans = spans_of([cases[-1], *cases], Setting(OrderOptions(tokens=most, width=8), settings))
    found = [makespan_and_waiting(each) for each in spans]
    figures: list[Figure] = []
    for place, name in enumerate(SYSTEMS):
        makespan, waiting = found[place]
        run = runs[place]
        over = (found[0][0] / makespan, runs[0].makespan / run.makespan)
        share = (100 * waiting, 100 * waiting_share(run, asked.stages))
        longer = f"makespan {makespan:.2f} s, simulated {factor * run.makespan:.2f} s"
        figures += _both(f"{name}: waiting", share, "%", longer)
        if place:
            figures += _both(name, over, "× 1F1B", longer)
    note = (
        f"{asked.steps} steps of {asked.adapters} adapters. Stages sleep for {factor:.3g} times the seconds "
        "of the cost model, in a process of its own each; all systems train the same samples."
    )
    return Report("LoRAFusion, what schedules add, measured", tuple(figures), (note, *asked.assumptions()))


def _both(name: str, values: tuple[float, float], unit: str, note: str) -> list[Figure]:
    """Measured and simulated, one below the other, so that both stand beside what is published."""
    return [
        Figure(name, values[0], unit, "measured", note=f"simulated {values[1]:.3g} {unit}; {note}"),
        Figure(f"{name}, simulated", values[1], unit, "simulated"),
    ]

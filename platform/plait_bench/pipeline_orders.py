"""Orders of a pipeline, measured over processes, beside the simulator.

The spans of stages say in which share of the time they waited, from the start of the first microbatch to the
end of the last. The simulator has the same lists. Where stages sleep it has the seconds for which they do;
where they train, the means of each stage's own spans in the same run, for its place in the pipeline is not
known to it. Of the same run, because how fast a stage is changes from run to run, and stages wait for the
slowest. Means, because shares are of sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.core.spans import ReplicaSpans, Span, SpanKind
from plait.engine.replica_times import times_between
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import require_processor
from plait_bench.order_cases import (
    SLEEP,
    Case,
    OrderOptions,
    Simulated,
    Times,
    case_of,
    with_collectives,
)
from plait_bench.order_processes import RECEIVED, Setting, spans_of

APART = 2.0  # points that a measured share may be from the simulated one
KINDS: Mapping[str, SpanKind] = {  # of the spans of instructions
    "forward": "microbatch",
    "backward": "microbatch",
    "step": "step",
    "send": "other",
    "receive": RECEIVED,
}
LONGER = 1.1  # times the simulated makespan that a measured one may take, where stages sleep
STALLED = 1.3  # times a makespan that it takes at least with a collective at each step


@dataclass(frozen=True, slots=True)
class Measured:
    """What a case took: seconds and the share of them in which stages waited, beside the simulator's. Means
    over its runs.

    Attributes:
        each_apart: by run, points by which its share is above that of its own simulation.
        replayed_apart: the same of the mean share, beside simulations that have every instruction's own
            seconds instead of the stage's.
    """

    makespan: float
    waiting: float
    simulated: Simulated
    each_apart: tuple[float, ...]
    replayed_apart: float

    @property
    def apart(self) -> float:
        """Points by which the share is above the simulated one."""
        return 100 * (self.waiting - self.simulated.waiting)

    @property
    def longer(self) -> float:
        """How many times the simulated makespan it took."""
        return self.makespan / self.simulated.makespan


def measured(
    case: Case, runs: Sequence[Sequence[ReplicaSpans]], times: Sequence[Sequence[Times]]
) -> Measured:
    """The runs of a case, each beside its simulation with these seconds of each stage in that run."""
    found = [Simulated(*makespan_and_waiting(each)) for each in runs]
    simulated = [case.simulated(each) for each in times]
    ours, theirs = _mean(found), _mean(simulated)
    replayed = _mean([case.replayed(_own_seconds(case, each)) for each in runs])
    apart = (100 * (one.waiting - other.waiting) for one, other in zip(found, simulated, strict=True))
    replayed_apart = 100 * (ours.waiting - replayed.waiting)
    return Measured(ours.makespan, ours.waiting, theirs, tuple(apart), replayed_apart)


def _mean(found: Sequence[Simulated]) -> Simulated:
    return Simulated(fmean(each.makespan for each in found), fmean(each.waiting for each in found))


def _own_seconds(case: Case, run: Sequence[ReplicaSpans]) -> list[list[float]]:
    """The seconds of every instruction of a run; none of those that have no span."""
    found = []
    for own, stage in zip(case.lists, run, strict=True):
        left = deque(span for span in stage.spans if span.kind != "waiting")
        while left and left[0].kind == "other":  # the lists were made
            left.popleft()
        kinds = (KINDS[each.kind.partition("_")[0]] for each in own)
        found.append([left.popleft().seconds if left and left[0].kind == kind else 0.0 for kind in kinds])
    return found


def makespan_and_waiting(spans: Sequence[ReplicaSpans]) -> tuple[float, float]:
    """From the start of the first microbatch to the end of the last, and the share in which stages wait."""
    inside = [span for each in spans for span in each.spans if span.kind == "microbatch"]
    start, end = min(span.start for span in inside), max(span.end for span in inside)
    waited = sum(each.waited_seconds for each in times_between(spans, start, end))
    return end - start, waited / (len(spans) * (end - start))


def times_of(run: Sequence[ReplicaSpans]) -> list[Times]:
    """The seconds of each stage in a run: the means of its spans."""
    return [_times_of(stage.spans) for stage in run]


def _times_of(spans: Sequence[Span]) -> Times:
    passes = [span for span in spans if span.kind == "microbatch"]
    steps, sends, receives = (
        [s.seconds for s in spans if s.kind == kind] for kind in ("step", "other", RECEIVED)
    )
    return Times(  # the engine counts a microbatch's tokens in its backward
        fmean(span.seconds for span in passes if not span.tokens),
        fmean(span.seconds for span in passes if span.tokens),
        fmean(steps),
        fmean(sends or [0.0]),
        fmean(receives or [0.0]),
    )


@benchmark("mlora/pipeline_orders", OrderOptions)
def pipeline_orders(settings: RunSettings, _jobs: Sequence[JobSpec], asked: OrderOptions) -> Report:
    """Waiting shares of every order, by stages and adapters, measured beside simulated.

    Raises:
        ConfigError: a wrong option.
        LostProcessError: a process died or hangs.
    """
    setting = Setting(asked, settings)
    cases = [
        case_of(name, stages, adapters, asked)
        for stages in asked.stages
        for adapters in asked.adapters
        for name in asked.orders
    ]
    if asked.work == SLEEP:
        return _sleeping(cases, setting)
    require_processor(settings)
    return _training(cases, setting)


def _sleeping(cases: Sequence[Case], setting: Setting) -> Report:
    asked = setting.asked
    often = replace(asked, microbatches=2, steps=2 * asked.steps)
    stepping = case_of("plait", max(asked.stages), max(asked.adapters), often)
    rounds = list(cases) * asked.repeats
    _, *spans, own, collective = spans_of(  # the first one connects the processes
        [stepping, *rounds, stepping, with_collectives(stepping)], setting
    )
    found = {
        case: measured(case, spans[at :: len(cases)], [[asked.seconds] * case.stages] * asked.repeats)
        for at, case in enumerate(cases)
    }
    before, stalled = (makespan_and_waiting(each)[0] for each in (own, collective))
    figures = (
        *_figures(found),
        Figure(
            "longest makespan over the simulator's",
            max(each.longer for each in found.values()),
            "×",
            "measured",
            Baseline(1.0, "simulated", at_most=LONGER),
        ),
        Figure(
            f"{stepping.label}, 2 microbatches a batch, a collective at each step: makespan",
            stalled,
            "s",
            "measured",
            Baseline(before, "without", at_least=STALLED),
        ),
    )
    times = f"{asked.forward:g} ms forward and {asked.backward:g} ms backward"
    note = f"A stage sleeps {times} for a microbatch, in a process of its own."
    return Report("Orders of a pipeline", figures, (note,))


def _training(cases: Sequence[Case], setting: Setting) -> Report:
    """Stages that train: all cases ``repeats`` times in turns, after a warm-up for each number of stages."""
    asked = setting.asked
    warm = [case_of("plait", stages, max(asked.adapters), asked) for stages in asked.stages]
    spans = spans_of([*warm, *list(cases) * asked.repeats], setting)[len(warm) :]
    runs = {case: spans[at :: len(cases)] for at, case in enumerate(cases)}
    times = {case: [times_of(run) for run in own] for case, own in runs.items()}
    found = {case: measured(case, own, times[case]) for case, own in runs.items()}
    notes = (
        f"Stages train {setting.run.model.kind}, {asked.tokens} tokens a microbatch, each in a process of "
        f"its own, {asked.repeats} times in turns; means. The simulator has each stage's of each run.",
        "By processor seconds: a stage's time passes while it computes, and where it takes a message, up "
        "to when that was sent. Messages take no time on their way.",
    )
    figures = (*_figures(found), *_seconds(times, asked.stages))
    return Report("Orders of a pipeline that trains", figures, notes)


def _seconds(times: Mapping[Case, Sequence[Sequence[Times]]], counts: Sequence[int]) -> list[Figure]:
    """Figures of the seconds of each stage: medians over the runs of all cases."""
    found: list[Figure] = []
    for stages in counts:
        runs = [run for case, each in times.items() if case.stages == stages for run in each]
        for stage in range(stages):
            forward, backward, step = (
                1000 * median(getattr(run[stage], kind) for run in runs)
                for kind in ("forward", "backward", "step")
            )
            name = f"{stages} stages: stage {stage + 1}, a forward"
            note = f"a backward {backward:.1f} ms, a step {step:.1f} ms"
            found.append(Figure(name, forward, "ms", "measured", note=note))
    return found


def _figures(found: Mapping[Case, Measured]) -> list[Figure]:
    """A line for each case, then the largest differences."""
    most = max(case.stages for case in found)
    figures = [_figure(case, each, detail=case.stages < most) for case, each in found.items()]
    allowed = Baseline(APART, "most that is allowed", at_most=1.0)
    own = [abs(each.apart) for each in found.values()]
    note = f"{_off(own)}; of single runs {_off([a for each in found.values() for a in each.each_apart])}"
    label = "largest difference from the simulated share"
    figures.append(Figure(label, max(own), "points", "measured", allowed, note=note))
    own = [abs(each.replayed_apart) for each in found.values()]
    label += " with every pass's own seconds"
    figures.append(Figure(label, max(own), "points", "measured", allowed, note=_off(own)))
    return figures


def _off(apart: Sequence[float]) -> str:
    return f"{sum(abs(each) > APART for each in apart)} of {len(apart)} are more than {APART:g} points off"


def _figure(case: Case, found: Measured, *, detail: bool) -> Figure:
    simulated = found.simulated
    note = (
        f"simulated {100 * simulated.waiting:.2f} %; "
        f"makespan {found.makespan:.2f} s, simulated {simulated.makespan:.2f} s"
    )
    baseline = Baseline(100 * simulated.waiting, "simulated")
    return Figure(
        f"{case.label}: waiting", 100 * found.waiting, "%", "measured", baseline, note=note, detail=detail
    )

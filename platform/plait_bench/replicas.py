"""Several processes against one with as many threads: speed, waiting, and what control costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import JobSpec
from plait.core.messages import GroupStep, RunSchedule
from plait.core.settings import RunSettings
from plait.distributed.fleet import Fleet
from plait.distributed.launch import Launcher
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, require_processor
from plait_bench.joint_side import JointRun, load_joint_side
from plait_bench.progress import part

WARM_UP = 10  # iterations: peaks are observed in the first, and seconds are fitted after eight
MOST_IDLE = 3.0  # % of an iteration in which no replica works


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``replicas``.

    Attributes:
        rounds: measured iterations of each side.
        commands: empty commands whose time is measured.
        loss_tolerance: relative; by how much a loss may differ between the sides.
    """

    rounds: Count = 20
    commands: Count = 500
    loss_tolerance: float = 0.02


@benchmark("replicas", Options)
def replicas(settings: RunSettings, jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Train ``jobs`` in one process and, in turns, in ``cluster.processes``, with as many threads in all.

    Raises:
        ConfigError: one process, no jobs, another device than the processor, or a wrong option.
        PlaitError: a job failed, or the sides' losses differ.
    """
    require_processor(settings)
    count, jobs = settings.cluster.processes, _long_enough(jobs, asked.rounds + WARM_UP)
    if count < 2:
        raise ConfigError(
            f"cluster.processes={count}", "Several are compared with one.", "Give cluster.processes=2."
        )
    threads = settings.engine.threads or 1
    alone = load_joint_side(replace(settings, engine=replace(settings.engine, threads=threads * count)), jobs)
    own = replace(alone.settings.engine, threads=threads)
    with ExitStack() as ending, TemporaryDirectory() as folder:
        many = replace(settings, engine=own)
        launcher = ending.enter_context(closing(Launcher(many.cluster)))
        fleet = launcher.fleet(Path(folder), many, alone.data)
        together = replace(alone, settings=many, worker=fleet)
        sides = {
            1: JointRun.of(alone, jobs, Path(folder) / "one"),
            count: JointRun.of(together, jobs, Path(folder) / "many"),
        }
        _train(sides, asked)
        control = _control_seconds(fleet, asked.commands)
    worst = _check(sides, asked.loss_tolerance)
    measured = {number: side.iterations[WARM_UP:] for number, side in sides.items()}
    return Report(
        "replicas",
        (
            *_speed_figures(measured, count),
            *_waiting_figures(measured[count]),
            _control_figure(control, count),
        ),
        (
            f"{len(jobs)} adapters, {asked.rounds} iterations of each side in turns, {settings.model.dtype}, "
            f"capacity {own.capacity}, {threads} threads per process. Losses differ by at most {worst:.1e}.",
        ),
    )


def _long_enough(jobs: Sequence[JobSpec], steps: int) -> list[JobSpec]:
    return [replace(job, train=replace(job.train, steps=steps, epochs=None)) for job in jobs]


def _train(sides: Mapping[int, JointRun], asked: Options) -> None:
    """In turns, each side first every other time: a neighbour on the machine disturbs both alike."""
    piece = part("iterations of one process and of several", asked.rounds + WARM_UP)
    for number in range(asked.rounds + WARM_UP):
        piece(f"iteration {number + 1}")
        for side in list(sides.values())[:: 1 if number % 2 else -1]:
            side.iterate()


def _check(sides: Mapping[int, JointRun], tolerance: float) -> float:
    """The largest relative difference between the sides' losses.

    Raises:
        PlaitError: it is above the tolerance.
    """
    one, many = (side.losses for side in sides.values())
    worst = max(abs(b / a - 1.0) for job in one for a, b in zip(one[job], many[job], strict=True))
    if not worst <= tolerance:
        raise PlaitError(
            f"losses differ by {worst:.2g}",
            f"{OPTIONS}.loss_tolerance={tolerance:g}: no speed is reported of sides that train differently.",
        )
    return worst


def _control_seconds(fleet: Fleet, commands: int) -> float:
    """Median seconds of a command to all processes in which there is nothing to do."""
    seconds = []
    for _ in range(commands):
        began = perf_counter()
        fleet.execute(RunSchedule(()))
        seconds.append(perf_counter() - began)
    return median(seconds)


def _speed_figures(measured: Mapping[int, Sequence[GroupStep]], count: int) -> list[Figure]:
    rates = {number: [each.tokens / each.seconds for each in own] for number, own in measured.items()}
    ratio = median(many / one for one, many in zip(rates[1], rates[count], strict=True))
    baseline = Baseline(median(rates[1]), f"one process with {count} times the threads", ratio)
    known = [
        (each.predicted_seconds, each.seconds)
        for each in measured[count]
        if each.predicted_seconds is not None
    ]
    predicted, seconds = (median(values) for values in zip(*known, strict=True))
    right = median(said / took for said, took in known)
    simulated = Baseline(seconds, "measured", right, at_least=0.9, at_most=1.1)
    name = f"{count} processes"
    return [
        Figure(f"tokens/s, {name}", median(rates[count]), "tokens/s", "measured", baseline),
        Figure(f"an iteration, {name}, from each share", predicted, "s", "simulated", simulated),
    ]


def _waiting_figures(iterations: Sequence[GroupStep]) -> list[Figure]:
    """How long replicas waited in an iteration, next to the prediction; and how long none worked."""
    waited = [
        100 * sum(own.waited_seconds for own in each.replicas) / len(each.replicas) / each.seconds
        for each in iterations
    ]
    expected = [
        100 * sum(own.predicted_waited_seconds or 0.0 for own in each.replicas) / len(each.replicas)
        / (each.predicted_seconds or each.seconds)
        for each in iterations
    ]  # fmt: skip
    idle = [100 * min(own.waited_seconds for own in each.replicas) / each.seconds for each in iterations]
    received = median(max(own.received_bytes for own in each.replicas) for each in iterations)
    aim = Baseline(MOST_IDLE, f"the aim: at most {MOST_IDLE:g} %", at_most=1.0)
    return [
        Figure("waiting, mean of the replicas", median(waited), "%", "measured",
               Baseline(median(expected), "predicted from each share")),
        Figure("no replica works", median(idle), "%", "measured", aim),
        Figure("gradients received by a process", received / 2**20, "MiB", "measured"),
    ]  # fmt: skip


def _control_figure(seconds: float, count: int) -> Figure:
    return Figure(f"round trip of a command to {count} processes", 1e6 * seconds, "µs", "measured")

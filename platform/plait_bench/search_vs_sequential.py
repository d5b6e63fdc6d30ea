"""`plait bench search_vs_sequential`: Plait's search against sequential Optuna + PEFT, on the same trials.

Both sides have the same trials in the same order, with the same dense weights, initial adapters, samples,
learning rates and evaluations. They take turns in one process: after each iteration of Plait's search, PEFT
trains its share of trials, so that a machine that grows slower or faster does so for both.

PEFT trains every trial to its end and evaluates it at the rungs too, each part timed by itself. So one run
tells what a search without a pruner takes (which evaluates at the ends alone), and, by replay through the
same rules, what a search takes that trains no trial further than its rungs allow.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import JobSpec
from plait.core.samples import Split
from plait.core.settings import RunSettings, SearchSettings, StoppingSettings
from plait.search.objective import check_measured
from plait.search.stopping import rungs_within
from plait_bench.benchmarks import benchmark
from plait_bench.curves import Curve, Point
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, require_processor
from plait_bench.joint_side import JointSide, load_joint_side
from plait_bench.listed_search import Evaluation, JointSearch, parameters_apart, reached, search_together
from plait_bench.peft_baseline import InitialWeights, PeftBaseline, Training
from plait_bench.progress import part
from plait_bench.replay import replay


class SequentialSearch:
    """Trains one trial after another.

    Args:
        baseline: PEFT's model.
        side: data.
        jobs: all different.
        initial: weights that the adapter of each begins with.
        steps: after which each is evaluated; the last is the budget.
        batch_size: of evaluations.

    Attributes:
        curves: of the trials trained so far.
    """

    def __init__(
        self,
        baseline: PeftBaseline,
        side: JointSide,
        jobs: Sequence[JobSpec],
        initial: Sequence[InitialWeights],
        steps: Sequence[int],
        batch_size: int,
    ) -> None:
        self._baseline = baseline
        self._side = side
        self._jobs = jobs
        self._initial = initial
        self._steps = steps
        self._batch_size = batch_size
        self._points = parameters_apart(jobs)
        self.curves: list[Curve] = []

    @property
    def done(self) -> bool:
        """Whether every trial is trained."""
        return len(self.curves) == len(self._jobs)

    def advance(self) -> None:
        """Train and evaluate the next trial."""
        index = len(self.curves)
        job = self._jobs[index]
        data = self._side.data.of(job.data)
        with self._baseline.training(job, data.train, self._initial[index]) as training:
            points = self._train(training, data.validation)
        self.curves.append(Curve(self._points[index], tuple(points)))

    def _train(self, training: Training, validation: Split) -> list[Point]:
        points: list[Point] = []
        seconds = 0.0
        for step in self._steps:
            began = perf_counter()
            while training.done < step:
                train_loss = training.step()
            trained = perf_counter()
            loss = training.evaluate(validation, self._batch_size)
            seconds += trained - began
            points.append(Point(step, loss, seconds, perf_counter() - trained, train_loss))
        return points


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Measured with one seed.

    Attributes:
        seed: of the order of the trials and of their data order, initial weights and dropout.
        joint: Plait's search.
        curves: PEFT's trials in the same order, all to their ends.
    """

    seed: int
    joint: JointSearch
    curves: tuple[Curve, ...]


def largest_difference(result: SeedResult) -> tuple[float, str]:
    """|Plait's loss − PEFT's| over PEFT's, at its largest over all evaluations that both did; and where."""
    found = (-1.0, "nowhere")
    for each in result.joint.evaluations:
        theirs = result.curves[result.joint.names.index(each.job)].at(each.step)
        if theirs is not None:
            difference = abs(each.loss - theirs.loss) / theirs.loss
            if not difference <= found[0]:  # what is no number counts as the largest
                found = (difference, f"{each.job}, step {each.step}")
            if isnan(difference):
                break
    return found


def check_agreement(result: SeedResult, tolerance: float) -> float:
    """The largest difference of a loss between the sides.

    Raises:
        PlaitError: it is larger than ``tolerance``.
    """
    largest, where = largest_difference(result)
    if not 0 <= largest <= tolerance:
        raise PlaitError(
            f"{where}: the validation losses of Plait and PEFT differ by {100 * largest:.3g} %",
            f"They may differ by at most {100 * tolerance:g} % (bench.options.loss_tolerance).",
            "No speed is reported if the losses differ. Find out what changed on either side.",
        )
    return largest


@dataclass(frozen=True, slots=True)
class Side:
    """One way to search.

    Attributes:
        best: lowest loss of a trial that came to its end.
        seconds: of the whole search.
        reached: until an evaluation was at the loss that all sides reach, or below.
    """

    best: float
    seconds: float
    reached: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sides with one seed.

    Attributes:
        target: the loss to be reached: the worst of the sides' best.
        joint: Plait.
        full: PEFT without a pruner.
        rungs: PEFT with the same rungs and the same decisions.
        pruner: PEFT with Optuna's SuccessiveHalvingPruner.
        any_order: ``full.reached``, on average over all orders of the trials.
    """

    target: float
    joint: Side
    full: Side
    rungs: Side
    pruner: Side
    any_order: float


def compare(result: SeedResult, search: SearchSettings) -> Comparison:
    """How long each way to search takes to the same loss.

    Raises:
        PlaitError: a side ended without a finished trial.
    """
    alone = replace(search, parallel=1)
    sides = {
        "full": replay(result.curves, replace(alone, stopping=StoppingSettings())),
        "rungs": replay(result.curves, alone),
        "pruner": replay(result.curves, replace(alone, stopping=optunas_halving(search.stopping))),
    }
    best = {"joint": min(result.joint.finished.values(), default=inf)} | {
        name: side.best for name, side in sides.items()
    }
    target = max(best.values())
    if not isfinite(target):
        raise PlaitError(f"best losses {best}", "Each side must bring a trial to its end.")
    timelines = {"joint": (result.joint.evaluations, result.joint.seconds)}
    timelines |= {name: (side.evaluations, side.seconds) for name, side in sides.items()}
    found = {
        name: Side(best[name], seconds, _reached(evaluations, target))
        for name, (evaluations, seconds) in timelines.items()
    }
    return Comparison(target=target, any_order=any_order(result.curves, target), **found)


def optunas_halving(stopping: StoppingSettings) -> StoppingSettings:
    """Optuna's own successive halving at the same rungs, called for each trial when it reaches one."""
    assert stopping.rungs  # checked where the options are
    return StoppingSettings(
        kind="optuna",
        rungs=stopping.rungs,
        pruner="SuccessiveHalvingPruner",
        options={"min_resource": stopping.rungs[0], "reduction_factor": stopping.eta},
    )


def _reached(evaluations: Sequence[Evaluation], target: float) -> float:
    seconds = reached(evaluations, target)
    assert seconds is not None  # the target is some trial's last loss on each side
    return seconds


def any_order(curves: Sequence[Curve], target: float) -> float:
    """Mean time until the first of the trials at ``target`` or below is over, over all orders.

    A trial that does not reach it is trained before the first of the k that do with probability 1 / (k + 1);
    the first one is each of the k alike.
    """
    good = [curve.seconds for curve in curves if curve.last.loss <= target]
    others = sum(curve.seconds for curve in curves if curve.last.loss > target)
    return sum(good) / len(good) + others / (len(good) + 1)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``search_vs_sequential``.

    Attributes:
        seeds: how many; each has another order of the trials, other data orders and other initial weights.
        loss_tolerance: largest difference of a validation loss between both sides, as a share; beyond it the
            benchmark fails, since sides that compute different things do not compare.
        evaluation_batch: samples of one padded batch in PEFT's evaluations.
    """

    seeds: Count = 5
    loss_tolerance: float = 0.05
    evaluation_batch: Count = 8


@benchmark("search_vs_sequential", Options)
def search_vs_sequential(settings: RunSettings, jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Search ``jobs`` on both sides, with one seed after another.

    Raises:
        ConfigError: no jobs, no rungs, an unknown option, or another device than the processor.
        PlaitError: a job failed, or the losses of both sides disagree.
    """
    _check(settings, jobs)
    arena, results = Arena.load(settings, jobs, asked), list[SeedResult]()
    for seed in range(asked.seeds):
        results.append(arena.race(seed))
        check_agreement(results[-1], asked.loss_tolerance)
    differences = [check_agreement(result, asked.loss_tolerance) for result in results]
    comparisons = [compare(result, settings.search) for result in results]
    figures = [*_compared(comparisons), *_figures(comparisons), _agreement(differences, asked.loss_tolerance)]
    return Report("search_vs_sequential", tuple(figures), _assumptions(settings, jobs, asked))


def _check(settings: RunSettings, jobs: Sequence[JobSpec]) -> None:
    require_processor(settings)
    if not settings.search.stopping.rungs:
        raise ConfigError(
            f"search.stopping.rungs={settings.search.stopping.rungs}",
            "Both sides stop trials at the same rungs.",
            "Set them: search/stopping=successive_halving search.stopping.rungs=[2,4,8].",
        )
    if settings.search.metric != "eval/loss":
        raise ConfigError(f"search.metric={settings.search.metric}", "This benchmark compares by eval/loss.")
    check_measured(settings.search, [job.data for job in jobs])


def seeded(jobs: Sequence[JobSpec], seed: int) -> list[JobSpec]:
    """The same jobs in another order, with that seed."""
    order = list(jobs)
    random.Random(seed).shuffle(order)
    return [replace(job, train=replace(job.train, seed=seed)) for job in order]


@dataclass(slots=True)
class Arena:
    """Both sides, loaded."""

    settings: RunSettings
    jobs: Sequence[JobSpec]
    options: Options
    side: JointSide
    baseline: PeftBaseline

    @classmethod
    def load(cls, settings: RunSettings, jobs: Sequence[JobSpec], options: Options) -> Arena:
        """Load the model for both sides, and let each go through it once."""
        side = load_joint_side(settings, jobs)
        side.warm_up(jobs[0])
        baseline = PeftBaseline.load(settings)
        baseline.warm_up(jobs[0], side.split(jobs[0]))
        return cls(settings, jobs, options, side, baseline)

    def race(self, seed: int) -> SeedResult:
        """Search on both sides, in turns."""
        jobs = seeded(self.jobs, seed)
        search = self.settings.search
        budget = min(map(self.side.steps, jobs))
        steps = [*rungs_within(search.stopping, (budget,)), budget]
        with tempfile.TemporaryDirectory() as folder:
            initial = [
                self.side.initial_weights(job, Path(folder) / "initial" / str(index))
                for index, job in enumerate(jobs)
            ]
            sequential = SequentialSearch(
                self.baseline, self.side, jobs, initial, steps, self.options.evaluation_batch
            )
            turns = _turns(sequential, len(jobs), budget, seed)
            joint = search_together(self.side, jobs, search, Path(folder) / "joint", turns)
            while not sequential.done:
                turns()
        return SeedResult(seed, joint, tuple(sequential.curves))


def _turns(sequential: SequentialSearch, trials: int, iterations: int, seed: int) -> Callable[[], None]:
    """What PEFT does between two iterations of Plait's search: train its share of the trials."""
    piece = part(f"seed {seed}, both sides in turns", trials)
    calls = 0

    def turn() -> None:
        nonlocal calls
        calls += 1
        while not sequential.done and len(sequential.curves) * iterations < calls * trials:
            piece(f"trial {len(sequential.curves)}")
            sequential.advance()

    return turn


def _figures(comparisons: Sequence[Comparison]) -> list[Figure]:
    """Medians over the seeds; what PEFT takes with rungs or in other orders is made of measured times."""

    def figure(name: str, what: Callable[[Comparison], float], unit: str, *, of: str = "") -> Figure:
        values = sorted(map(what, comparisons))
        spread = f"{values[0]:.3g} to {values[-1]:.3g}"
        if not of:
            return Figure(name, median(values), unit, "measured", note=spread)
        return Figure(name, median(values), unit, "computed", note=f"{spread}; {of}")

    parts = "from the measured times of all trials, replayed"
    orders = "mean over all orders of its trials, from their measured times"
    trials = "sum of its measured trials without their evaluations at rungs"
    return [
        figure("loss that all sides reach", lambda c: c.target, "nats"),
        figure(
            "Plait's best loss above the full grid's", lambda c: 100 * (c.joint.best / c.full.best - 1), "%"
        ),
        figure("Plait: until it was reached", lambda c: c.joint.reached, "s"),
        figure("sequential, no pruner: until it was reached", lambda c: c.full.reached, "s", of=trials),
        figure("sequential, same rungs: until it was reached", lambda c: c.rungs.reached, "s", of=parts),
        figure("Plait: whole search", lambda c: c.joint.seconds, "s"),
        figure("sequential, no pruner: whole search", lambda c: c.full.seconds, "s", of=trials),
        figure("sequential, same rungs: whole search", lambda c: c.rungs.seconds, "s", of=parts),
        figure(
            "to the same loss, over no pruner, in any order",
            lambda c: c.any_order / c.joint.reached,
            "×",
            of=orders,
        ),
    ]


def _compared(comparisons: Sequence[Comparison]) -> list[Figure]:
    """Plait compared with each sequential method: medians over the seeds; the ratio is the median of
    ratios."""
    others: dict[str, Callable[[Comparison], Side]] = {
        "no pruner": lambda each: each.full,
        "the same rungs": lambda each: each.rungs,
        "Optuna's halving pruner": lambda each: each.pruner,
    }
    times: dict[str, Callable[[Side], float]] = {
        "whole search": lambda side: side.seconds,
        "until the loss was reached": lambda side: side.reached,
    }
    figures = []
    for what, seconds in times.items():
        for name, other in others.items():
            ours = [seconds(each.joint) for each in comparisons]
            theirs = [seconds(other(each)) for each in comparisons]
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            baseline = Baseline(median(theirs), f"sequential Optuna + PEFT, {name}", ratio, at_most=1.0)
            figures.append(Figure(f"{what}, {name}", median(ours), "s", "measured", baseline))
    return figures


def _agreement(differences: Sequence[float], tolerance: float) -> Figure:
    return Figure(
        "largest difference of a trial's validation loss",
        100 * max(differences),
        "%",
        "measured",
        target=Baseline(100 * tolerance, "bench.options.loss_tolerance", at_most=1.0),
    )


def _assumptions(settings: RunSettings, jobs: Sequence[JobSpec], options: Options) -> tuple[str, ...]:
    stopping = settings.search.stopping
    rungs = ", ".join(map(str, stopping.rungs or ()))
    return (
        f"Medians over {options.seeds} seeds (smallest to largest in the notes); {len(jobs)} trials of "
        f"{jobs[0].train.steps} steps, batch {jobs[0].train.global_batch}; {stopping.kind} at {rungs}, eta "
        f"{stopping.eta}; {settings.model.dtype}, {torch.get_num_threads()} threads, capacity "
        f"{settings.engine.capacity_or_usual}.",
        "Plait's seconds are the whole loop: suggesting, packing, training, evaluations, pausing and export. "
        "PEFT's are its training and its evaluations: without a pruner at the ends of trials alone, with "
        "rungs at those it comes to, but nothing for pausing and resuming a trial. Loading is not timed.",
        "PEFT trained every trial to its end; what it takes with rungs is derived by replay of its measured "
        "parts through the same loop and rules, one trial at a time.",
    )

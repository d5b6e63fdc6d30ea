"""``plait bench search_vs_sequential``: Plait's search against sequential Optuna + PEFT, on the same trials.

Both sides have the same trials in the same order, with the same dense weights, initial adapters, samples,
learning rates and evaluations. They take turns in one process: after each iteration of Plait's search, PEFT
goes on by its share of trials, so that a machine that grows slower or faster does so for both.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from plait.config.fields import build
from plait.core.errors import ConfigError, DataError, StorageError
from plait.core.figures import Figure, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.engine.devices import choose_device
from plait.models import load_tokeniser
from plait.models.load import transformers_model
from plait.search.objective import check_measured
from plait.search.stopping import rung_steps
from plait.tracking.facts import git_state
from plait.utils.benchmarks import BENCHMARKS
from plait.utils.files import write_text
from plait.utils.paths import cache_dir
from plait.utils.progress import part
from plait_bench.joint_side import JointSide, load_joint_side
from plait_bench.peft_baseline import PeftBaseline
from plait_bench.search_vs_sequential_joint import search_together
from plait_bench.search_vs_sequential_result import Comparison, SeedResult, check_agreement, compare
from plait_bench.sequential_search import SequentialSearch


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        seeds: how many; each has another order of the trials, other data orders and other initial weights.
        loss_tolerance: largest difference of a validation loss between both sides, as a share; beyond it the
            benchmark fails, since sides that compute different things do not compare.
        evaluation_batch: samples of one padded batch in PEFT's evaluations.
        autocast: whether PEFT's side runs under autocast.
        path: where each seed is kept when it is done, and gone on from; None: below ``tracking.root``.
        fresh: measure all seeds anew.
    """

    seeds: int = 5
    loss_tolerance: float = 0.05
    evaluation_batch: int = 8
    autocast: bool = False
    path: Path | None = None
    fresh: bool = False

    def __post_init__(self) -> None:
        for key in ("seeds", "evaluation_batch"):
            if getattr(self, key) < 1:
                raise ConfigError(f"bench.options.{key}={getattr(self, key)}", "It must be at least 1.")


@BENCHMARKS.register("search_vs_sequential")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Search ``jobs`` on both sides, with one seed after another.

    Raises:
        ConfigError: no jobs, no rungs, an unknown option, another device than the processor, or a file of
            other settings.
        PlaitError: a job failed, or the losses of both sides disagree.
    """
    asked = build(Options, options, "bench.options")
    _check(settings, jobs)
    kept = Kept.open(asked, settings, jobs)
    missing = [seed for seed in range(asked.seeds) if seed not in kept.results]
    if missing:
        arena = Arena.load(settings, jobs, asked)
        for seed in missing:
            result = arena.race(seed)
            check_agreement(result, asked.loss_tolerance)
            kept.add(result)
    results = [kept.results[seed] for seed in range(asked.seeds)]
    differences = [check_agreement(result, asked.loss_tolerance) for result in results]
    comparisons = [compare(result, settings.search) for result in results]
    figures = [*_figures(comparisons), _agreement(differences, asked.loss_tolerance)]
    return Report("search_vs_sequential", tuple(figures), _assumptions(settings, jobs, asked, kept))


def _check(settings: RunSettings, jobs: Sequence[JobSpec]) -> None:
    if choose_device(settings.engine.device).type != "cpu":
        raise ConfigError(
            f"engine.device={settings.engine.device}",
            "This benchmark measures the processor's time.",
            "Give engine.device=cpu.",
        )
    if not settings.search.stopping.rungs:
        raise ConfigError(
            f"search.stopping.rungs={settings.search.stopping.rungs}",
            "Both sides stop trials at the same rungs.",
            "Give them: search/stopping=successive_halving search.stopping.rungs=[2,4,8].",
        )
    if settings.search.metric != "eval/loss":
        raise ConfigError(f"search.metric={settings.search.metric}", "This benchmark judges by eval/loss.")
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
        pad = load_tokeniser(settings.model, cache=cache_dir())
        baseline = PeftBaseline(
            transformers_model(settings.model, cache=cache_dir()),
            pad.eos_token_id if pad.pad_token_id is None else pad.pad_token_id,
            autocast=options.autocast,
        )
        baseline.warm_up(jobs[0], side.split(jobs[0]))
        return cls(settings, jobs, options, side, baseline)

    def race(self, seed: int) -> SeedResult:
        """Search on both sides, in turns."""
        jobs = seeded(self.jobs, seed)
        search = self.settings.search
        budget = min(map(self.side.steps, jobs))
        steps = [*rung_steps(search.stopping, budget), budget]
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
        facts = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": git_state(Path(__file__).parent).commit,
            "threads": torch.get_num_threads(),
        }
        return SeedResult(seed, joint, tuple(sequential.curves), facts)


def _turns(sequential: SequentialSearch, trials: int, iterations: int, seed: int) -> Callable[[], None]:
    """What PEFT's side does between two iterations of Plait's search: its share of the trials."""
    piece = part(f"seed {seed}, both sides in turns", trials)
    calls = 0

    def turn() -> None:
        nonlocal calls
        calls += 1
        while not sequential.done and len(sequential.curves) * iterations < calls * trials:
            piece(f"trial {len(sequential.curves)}")
            sequential.advance()

    return turn


@dataclass(slots=True)
class Kept:
    """The seeds measured so far, in a file."""

    path: Path
    problem: str
    results: dict[int, SeedResult]

    @classmethod
    def open(cls, options: Options, settings: RunSettings, jobs: Sequence[JobSpec]) -> Kept:
        """What there is.

        Raises:
            ConfigError: the file is of other settings.
            DataError: it cannot be read.
        """
        path = options.path or settings.tracking.root / "search_vs_sequential.json"
        problem = _problem(settings, jobs, options)
        if options.fresh or not path.exists():
            return cls(path, problem, {})
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            results = [SeedResult.from_json(item) for item in content["seeds"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: {error}", "It keeps the seeds of search_vs_sequential.", "Remove it."
            ) from error
        if content["problem"] != problem:
            raise ConfigError(
                f"{path}",
                "It keeps seeds that were measured with other settings.",
                "Give another bench.options.path, or bench.options.fresh=true.",
            )
        return cls(path, problem, {result.seed: result for result in results})

    def add(self, result: SeedResult) -> None:
        """Keep a seed, on disk.

        Raises:
            StorageError: the file cannot be written.
        """
        self.results[result.seed] = result
        seeds = [self.results[seed].to_json() for seed in sorted(self.results)]
        try:
            write_text(self.path, json.dumps({"problem": self.problem, "seeds": seeds}))
        except OSError as error:
            raise StorageError(
                f"{self.path}: {error.strerror or error}",
                "It keeps the seeds of search_vs_sequential.",
                "Free some space, or give another bench.options.path.",
            ) from error


def _problem(settings: RunSettings, jobs: Sequence[JobSpec], options: Options) -> str:
    """What must be the same for seeds to stand side by side."""
    facts: dict[str, Any] = {
        "model": asdict(settings.model),
        "engine": asdict(settings.engine),
        "stopping": asdict(settings.search.stopping),
        "parallel": settings.search.parallel,
        "jobs": [job.parameters() for job in jobs],
        "options": [options.evaluation_batch, options.autocast],
        "threads": torch.get_num_threads(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


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
            "to the same loss, over no pruner, in these orders",
            lambda c: c.full.reached / c.joint.reached,
            "×",
            of=trials,
        ),
        figure(
            "to the same loss, over no pruner, in any order",
            lambda c: c.any_order / c.joint.reached,
            "×",
            of=orders,
        ),
        figure(
            "to the same loss, over the same rungs",
            lambda c: c.rungs.reached / c.joint.reached,
            "×",
            of=parts,
        ),
        figure(
            "to the same loss, over Optuna's halving pruner",
            lambda c: c.pruner.reached / c.joint.reached,
            "×",
            of=parts,
        ),
        figure("whole search, over no pruner", lambda c: c.full.seconds / c.joint.seconds, "×", of=trials),
        figure(
            "whole search, over the same rungs", lambda c: c.rungs.seconds / c.joint.seconds, "×", of=parts
        ),
        figure(
            "whole search, over Optuna's halving pruner",
            lambda c: c.pruner.seconds / c.joint.seconds,
            "×",
            of=parts,
        ),
    ]


def _agreement(differences: Sequence[float], tolerance: float) -> Figure:
    return Figure(
        "largest difference of a trial's validation loss",
        100 * max(differences),
        "%",
        "measured",
        note=f"at most {100 * tolerance:g} % is allowed",
    )


def _assumptions(
    settings: RunSettings, jobs: Sequence[JobSpec], options: Options, kept: Kept
) -> tuple[str, ...]:
    stopping = settings.search.stopping
    rungs = ", ".join(map(str, stopping.rungs or ()))
    facts = [result.facts for result in kept.results.values()]
    return (
        f"Medians over {options.seeds} seeds (smallest to largest in the notes); {len(jobs)} trials of "
        f"{jobs[0].train.steps} steps, batch {jobs[0].train.global_batch}; {stopping.kind} at {rungs}, eta "
        f"{stopping.eta}; {settings.model.dtype}, {torch.get_num_threads()} threads, capacity "
        f"{settings.engine.capacity_or_usual}.",
        "Plait's seconds are the whole loop: drawing, packing, training, evaluations, parking and export. "
        "PEFT's are its training and its evaluations: without a pruner at the ends of trials alone, with "
        "rungs at those it comes to, nothing for leaving a trial and going on with it. Loading is not timed.",
        "PEFT trained every trial to its end; what it takes with rungs is derived by replay of its measured "
        "parts through the same loop and rules, one trial at a time.",
        f"Each seed is kept in {kept.path}. {measured_when(facts)}",
    )


def measured_when(facts: Sequence[Mapping[str, Any]]) -> str:
    """When the seeds were measured and on which commit; several commits are said, for figures mix them."""
    times = sorted(str(each["when"]) for each in facts)
    commits = sorted({str(each["commit"])[:12] for each in facts})
    text = f"They were measured from {times[0]} to {times[-1]}, commit {', '.join(commits)}."
    if len(commits) == 1:
        return text
    return f"{text} These are {len(commits)} versions: bench.options.fresh=true measures all anew."

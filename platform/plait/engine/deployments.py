"""Chooses the replicas that the processes of this machine make: their stages and slices, or a sharded base.

Candidates are equal replicas of ⟨tp, pp⟩ processes, and one base that is sharded among all. Of those in whose
fullest process a job fits, the one with the least predicted seconds is chosen: those of the mean step of all
jobs that train at once, by the stored profile. Seconds of slices and shards also need the speed of the link
between the processes. Candidates without seconds are only taken if none with seconds fits, in their order:
of the fewest processes in a replica, stages before slices, the sharded base last.

A seam: `plait sweep` and `plait plan` decide here, by the same numbers. The choice is recorded with the
search, which resumes with it on as many processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import inf
from typing import TYPE_CHECKING

from plait.core.errors import CapacityError, ConfigError, ModelError
from plait.core.jobs import AdapterSpec, JobSpec
from plait.core.plans import ReplicaShape
from plait.core.settings import ClusterSettings, RunSettings
from plait.cost.profile_store import Profile
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import TimeModel
from plait.engine.admission import Admission, choose_capacity
from plait.engine.build import (
    free_memory,
    on_gpu,
    recorded_before,
    stored_profile,
    threads_each,
    worker_facts,
)
from plait.engine.catalogue import DataCatalogue
from plait.engine.replicas import dispatch_time
from plait.engine.splits import Splits
from plait.engine.steps import DataOrder
from plait.engine.worker import WorkerFacts
from plait.planner.buckets import mean_step
from plait.planner.weighing import MeanStep

if TYPE_CHECKING:
    from pathlib import Path

    from plait.models.load import ModelShape

AHEAD = 8  # steps of each job whose lengths make the mean step
PASSES = 2  # forward and backward: in each, a sharded layer is gathered
SUMS = 4  # of a layer's hidden states among slices: two forward, two backward
NO_PROFILE = "seconds unknown: run `{}` first"
NO_LINK = "seconds unknown: set cluster.link_gb_per_s, the speed between processes"
Check = Callable[[RunSettings], None]


@dataclass(frozen=True, slots=True)
class Replicas:
    """So many replicas of one shape; or whole ones that share the base model's layers."""

    shape: ReplicaShape
    count: int
    sharded: bool = False

    def __str__(self) -> str:
        each = "sharded base" if self.sharded else f"⟨{self.shape.tensor},{self.shape.pipeline}⟩"
        return f"{each} ×{self.count}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Replicas that there may be, with what is predicted of them.

    Attributes:
        settings: of a run with it, capacity included; None if there is no such run.
        jobs: of those that may train at once, how many fit.
        bytes: predicted peak of the fullest process with these jobs.
        seconds: of one step of each job that may train at once; None: unknown.
        time: seconds of its microbatches; None: unknown.
        why: why it is not chosen; "" if it is.
    """

    replicas: Replicas
    settings: RunSettings | None = field(default=None, repr=False)
    jobs: int = 0
    bytes: int | None = None
    seconds: float | None = None
    time: TimeModel | None = field(default=None, repr=False)
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the search can run with it."""
        return self.jobs > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """All candidates, in their order, and the number of the one that is chosen.

    Attributes:
        unknown: why its seconds are; "" if they are known.
    """

    candidates: tuple[Candidate, ...]
    number: int
    unknown: str = ""

    @property
    def chosen(self) -> Candidate:
        """The chosen one."""
        return self.candidates[self.number]

    def __str__(self) -> str:
        found = self.chosen
        by = "with the fewest predicted seconds" if found.seconds is not None else "the first that fits"
        unknown = "" if found.seconds is not None else f"; {self.unknown}"
        return (
            f"Replicas: {found.replicas}, {by} of {len(self.candidates)} candidates{unknown}. "
            "`plait plan` shows all."
        )


def candidates(processes: int) -> Iterator[Replicas]:
    """The candidates for so many processes, in their order."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    for size in sizes:
        alike = (ReplicaShape(size // tensor, tensor) for tensor in sizes if size % tensor == 0)
        yield from (Replicas(shape, processes // size) for shape in alike)
    if processes > 1:
        yield Replicas(ReplicaShape(), processes, sharded=True)


@dataclass(frozen=True, slots=True)
class Weighing:
    """What the candidates of one search are weighed by.

    Attributes:
        memory_bytes: of each process.
        trials: how many there are.
        recorded: the capacity with which the search was begun; None: it begins now.
        check: raises InputError if a run with these settings is refused before it starts.
    """

    settings: RunSettings
    model: ModelShape
    data: DataCatalogue
    jobs: Sequence[JobSpec]
    profile: Profile | None
    memory_bytes: int
    trials: int
    check: Check
    on_gpu: bool = False
    recorded: int | None = None

    def choose(self) -> Choice:
        """The best candidate.

        Raises:
            CapacityError: none fits.
        """
        found = [self.weigh(each) for each in candidates(self.settings.cluster.processes)]
        fitting = [place for place, each in enumerate(found) if each.fits]
        if not fitting:
            raise CapacityError(
                f"cluster.processes={self.settings.cluster.processes} with cluster.deployment=auto",
                "No replicas fit: " + "; ".join(f"{each.replicas}: {each.why}" for each in found) + ".",
                "Use more processes, lower engine.capacity or adapter.rank, or set engine.checkpointing.",
            )
        best = min(fitting, key=lambda place: (_seconds(found[place]), place))
        for place in fitting:
            if place != best and not found[place].why:
                found[place] = replace(found[place], why=_slower(found[place], found[best]))
        unknown = found[best].why
        found[best] = replace(found[best], why="")
        return Choice(tuple(found), best, unknown)

    def weigh(self, replicas: Replicas) -> Candidate:
        """A candidate with its predictions, or why there are none."""
        try:
            run = self._run(replicas)
            self.check(run)
            capacity = self._capacity(run)
            run = replace(run, engine=replace(run.engine, capacity=capacity))
            split = self._split(run)
            run = replace(run, cluster=replace(run.cluster, layer_split=split))
            admission = Admission(self._facts(run), run, self.profile)
            demands = [admission.demand(*each) for each in self._asked]
        except (ConfigError, ModelError, CapacityError) as error:
            return Candidate(replicas, why=f"{error.value}: {error.rule}".rstrip("."))
        together = list(islice(cycle(zip(self.jobs, demands, strict=True)), self._together))
        while len(together) > 1 and not admission.fits([demand for _, demand in together]):
            together.pop()
        needed = admission.predicted([demand for _, demand in together])
        time, why = time_of(run, self.model, self.profile, self.memory_bytes)
        found = Candidate(replicas, run, len(together), needed, time=time, why=why)
        if time is None:
            return found
        shape = replicas.shape
        configuration = Configuration(shape.tensor, shape.pipeline, capacity, layer_split=split)
        seconds = self.step_seconds(configuration, replicas.count, time, [job for job, _ in together])
        if seconds is None:
            return replace(found, jobs=0, why=f"a sample is longer than {capacity} tokens")
        return replace(found, seconds=seconds * self._together / len(together))

    @property
    def _together(self) -> int:
        """Jobs that may train at once."""
        return min(self.trials, self.settings.most_jobs)

    def _run(self, replicas: Replicas) -> RunSettings:
        cluster = replace(
            self.settings.cluster,
            deployment=(),
            tensor=replicas.shape.tensor,
            pipeline=replicas.shape.pipeline,
            shard_base=replicas.sharded,
        )
        cluster.check_lists()
        return replace(self.settings, cluster=cluster)

    @property
    def _asked(self) -> list[tuple[AdapterSpec, int, int]]:
        return [(job.adapter, self.data.longest(job.data), job.train.global_batch) for job in self.jobs]

    def _facts(self, run: RunSettings) -> WorkerFacts:
        return worker_facts(run, self.model, self.memory_bytes)

    def _capacity(self, run: RunSettings) -> int:
        facts, asked = self._facts(run), set(self._asked)
        return choose_capacity(run, facts, self.profile, asked, self.recorded, on_gpu=self.on_gpu)

    def _split(self, run: RunSettings) -> tuple[int, ...]:
        """Layers of each stage that fit, the fastest by the profile's seconds; without them by arithmetic.

        Raises:
            CapacityError: no split fits.
        """
        if run.cluster.pipeline == 1:
            return ()
        facts = self._facts(run)
        time = self.profile.time if self.profile is not None else None
        splits = Splits.of(facts, run, self.profile, self._asked)
        return splits.fastest(time or dispatch_time(facts, None))

    def step_seconds(
        self, configuration: Configuration, count: int, time: TimeModel, jobs: Sequence[JobSpec]
    ) -> float | None:
        """Seconds of the mean step of these jobs on so many equal replicas; None if a sample does not fit."""
        lengths, labelled = [], 0.0
        for job in jobs:
            split = self.data.of(job.data).train
            order = DataOrder.over(job.train, split)
            for number in range(1, min(AHEAD, order.steps) + 1):
                lengths += [int(split.lengths[sample]) for sample in order.at(number)[0]]
            labelled += float(split.labelled.sum() / split.lengths.sum()) / len(jobs)
        step = mean_step(lengths, AHEAD, required={configuration.max_tokens})
        cost = ReplicaCost.of(configuration, step.means, time, labelled_share=labelled)
        devices = {"": count * configuration.devices}
        found = MeanStep((cost,), step.counts, 1, devices).on([(configuration, count)])
        return None if found is None else found.makespan


def measure(settings: RunSettings) -> str:
    """The command that measures the seconds of one of the processes."""
    threads = threads_each(settings) if settings.cluster.processes > 1 else None
    return "plait profile" + (f" engine.threads={threads}" if threads else "")


def time_of(
    run: RunSettings, model: ModelShape, profile: Profile | None, memory_bytes: int
) -> tuple[TimeModel | None, str]:
    """Seconds of the microbatches of a run with these replicas; if they are unknown, why."""
    time, cluster = None if profile is None else profile.time, run.cluster
    if time is None:
        return None, NO_PROFILE.format(measure(run))
    unmeasured = {each.tensor for each in cluster.shapes} - time.layer.keys()
    if not cluster.shard_base and not unmeasured:
        return time, ""
    if cluster.link_gb_per_s is None:
        return None, NO_LINK
    whole = replace(cluster, tensor=1, pipeline=1, deployment=(), shard_base=False, layer_split=())
    shape = worker_facts(replace(run, cluster=whole), model, memory_bytes).shape
    rate = 1e9 * cluster.link_gb_per_s
    if cluster.shard_base:
        seconds = shape.weight_bytes / shape.layers * (1 - 1 / cluster.processes) / rate
        if on_gpu(run):
            return replace(time, gather=seconds), ""
        return time.gathering(PASSES * seconds), ""  # a processor gathers no faster ahead
    for tensor in sorted(unmeasured):
        row = 2 * (1 - 1 / tensor) * shape.hidden * shape.element_bytes  # of a sum in a ring
        time = time.sliced(tensor, SUMS * row / rate)
    return time, ""


def _seconds(candidate: Candidate) -> float:
    return inf if candidate.seconds is None else candidate.seconds


def _slower(candidate: Candidate, best: Candidate) -> str:
    if candidate.seconds is None or best.seconds is None:
        return "not the first that fits"
    return f"{candidate.seconds / best.seconds:.2f} times the seconds of {best.replicas}"


def settle_deployment(
    settings: RunSettings,
    model: ModelShape,
    data: DataCatalogue,
    jobs: Sequence[JobSpec],
    check: Check,
    *,
    points: int | None = None,
    folder: Path | None = None,
) -> tuple[RunSettings, Choice | None]:
    """The settings with the replicas chosen, if that is asked for, and how; None if there was no choice.

    Args:
        check: as of :class:`Weighing`.
        points: of the search space; None: any number.
        folder: of the search, which resumes with its own choice.

    Raises:
        CapacityError: no candidate fits.
    """
    if not settings.cluster.to_choose:
        return settings, None
    before = recorded_before(settings, folder)
    if kept := _read(settings.cluster, before.get("deployment")):
        return replace(settings, cluster=kept), None
    capacity = before.get("capacity")
    weighing = Weighing(
        settings,
        model,
        data,
        jobs,
        stored_profile(settings, model.digest),
        free_memory(settings),
        min(settings.search.trials, points or settings.search.trials),
        check,
        on_gpu(settings),
        capacity if isinstance(capacity, int) else None,
    )
    choice = weighing.choose()
    assert choice.chosen.settings is not None
    return replace(settings, cluster=choice.chosen.settings.cluster), choice


def written(cluster: ClusterSettings) -> str:
    """What was chosen, as it is recorded with a search, and for how many processes: fewer may be left."""
    split = ",".join(map(str, cluster.layer_split))
    numbers = (cluster.tensor, cluster.pipeline, int(cluster.shard_base), cluster.processes)
    return f"{' '.join(map(str, numbers))} {split}".rstrip()


def _read(cluster: ClusterSettings, text: object) -> ClusterSettings | None:
    """The cluster with what :func:`written` wrote; None if it did not, or for other processes."""
    words = str(text).split()
    if not 4 <= len(words) <= 5 or words[3] != str(cluster.processes):
        return None
    tensor, pipeline, sharded = map(int, words[:3])
    split = tuple(map(int, words[4].split(","))) if len(words) == 5 else ()
    return replace(
        cluster,
        deployment=(),
        tensor=tensor,
        pipeline=pipeline,
        shard_base=bool(sharded),
        layer_split=split,
    )

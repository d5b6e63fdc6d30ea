"""Plait's side of a benchmark: an engine without search and tracking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from safetensors.torch import load_file
from torch import Tensor

from plait.adapters.facts import WEIGHTS
from plait.adapters.variants import PREFIX
from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Attach,
    Detach,
    Export,
    GroupStep,
    JobProgress,
    RunSchedule,
    StepJob,
)
from plait.core.plans import GlobalBatch, Microbatch
from plait.core.samples import Split
from plait.core.settings import RunSettings
from plait.engine.build import check_engine, open_data
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.devices import choose_device
from plait.engine.local_worker import LocalWorker
from plait.engine.steps import DataOrder, training_batch
from plait.engine.worker import Worker
from plait.models.base import BaseModel
from plait.models.load import inspect_model, load_model
from plait.planner.packing import pack
from plait.utils.paths import cache_dir
from plait_bench.progress import part


@dataclass(slots=True, eq=False)
class JointSide:
    """A loaded model with its worker, and the data of the benchmark's jobs."""

    settings: RunSettings
    data: DataCatalogue
    model: BaseModel
    worker: Worker

    def split(self, job: JobSpec) -> Split:
        """The job's training samples."""
        return self.data.of(job.data).train

    def steps(self, job: JobSpec) -> int:
        """Optimiser steps of the job's budget."""
        return DataOrder.over(job.train, self.split(job)).steps

    def batch(self, job: JobSpec, step: int) -> GlobalBatch:
        """The global batch of one optimiser step; steps beyond the budget repeat its batches."""
        order = DataOrder.over(job.train, self.split(job))
        return training_batch(job, order, self.split(job), (step - 1) % order.steps + 1)

    def pack(self, jobs: Sequence[JobSpec], step: int, capacity: int) -> tuple[Microbatch, ...]:
        """One global batch of every job, in microbatches of at most ``capacity`` tokens."""
        return pack([self.batch(job, step) for job in jobs], capacity=capacity)

    def pass_through(self, microbatches: tuple[Microbatch, ...]) -> None:
        """Forward and backward; gradients add up."""
        self.worker.execute(RunSchedule(microbatches))

    def timed_step(self, jobs: Sequence[JobSpec], microbatches: tuple[Microbatch, ...], step: int) -> float:
        """Seconds of a joint step: forward, backward and every job's optimiser step."""
        started = perf_counter()
        self.pass_through(microbatches)
        self.worker.execute(RunSchedule(tuple(StepJob(job.name, step, job.train.lr) for job in jobs)))
        return perf_counter() - started

    @contextmanager
    def attached(self, jobs: Sequence[JobSpec]) -> Iterator[None]:
        """Attach fresh jobs to the worker within the context."""
        for job in jobs:
            self.worker.execute(Attach(job))
        yield
        for job in jobs:
            self.worker.execute(Detach(job.name))

    @contextmanager
    def kernels(self, backend: str) -> Iterator[None]:
        """Let ``backend`` compute the adapters' part within the context."""
        self.model.install(backend=backend)
        try:
            yield
        finally:
            self.model.install(backend=self.worker.facts.chosen["kernels"])

    def warm_up(self, job: JobSpec) -> None:
        """Run one forward and backward pass without effects, so that no first call is timed."""
        with self.attached([job]):
            self.pass_through(self.pack([job], 1, self.settings.engine.capacity_or_usual))

    def initial_weights(self, job: JobSpec, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each site of a fresh job, read from its exported adapter."""
        with self.attached([job]):
            self.worker.execute(Export(job.name, folder))
        stored = load_file(folder / WEIGHTS)
        a_of = {name.removesuffix(".lora_A.weight"): a for name, a in stored.items() if "lora_A" in name}
        return {site.removeprefix(PREFIX): (a, stored[f"{site}.lora_B.weight"]) for site, a in a_of.items()}


def load_joint_side(
    settings: RunSettings, jobs: Sequence[JobSpec], clock: Callable[[], float] = perf_counter
) -> JointSide:
    """Tokenise the jobs' data and load the model.

    Args:
        clock: of the device's seconds.

    Raises:
        ConfigError: there are no jobs.
        InputError: model or data cannot be used.
    """
    if not jobs:
        raise ConfigError("no jobs", "A benchmark of training has at least one job.", "Raise search.trials.")
    check_engine(settings, jobs)
    # The same capacity on every machine, whatever its profile, because figures are compared with each other.
    engine = replace(settings.engine, capacity=settings.engine.capacity_or_usual)
    settings = replace(settings, engine=engine)
    shape = inspect_model(settings.model, cache=cache_dir())
    data = open_data(settings, shape.max_length, jobs).catalogue
    part("loading the model")
    model = load_model(settings.model, cache=cache_dir(), device=choose_device(settings.engine.device))
    return JointSide(settings, data, model, LocalWorker(model, data, settings.engine, clock=clock))


@dataclass(slots=True, eq=False)
class JointRun:
    """Jobs trained together, so far.

    Attributes:
        steps: optimiser steps of all jobs' budgets.
        losses: losses of each optimiser step, by job.
        iterations: what each was: packing, microbatches and optimiser steps.
    """

    coordinator: Coordinator
    steps: int
    losses: dict[str, list[float]] = field(default_factory=dict)
    iterations: list[GroupStep] = field(default_factory=list)

    @classmethod
    def of(cls, side: JointSide, jobs: Sequence[JobSpec], folder: Path) -> JointRun:
        """Submit ``jobs`` without training yet."""
        coordinator = Coordinator(side.worker, side.data, side.settings, folder=folder)
        for job in jobs:
            coordinator.submit(job)
        return cls(coordinator, sum(map(side.steps, jobs)), {job.name: [] for job in jobs})

    @property
    def share(self) -> float:
        """Optimiser steps done, of all."""
        return sum(map(len, self.losses.values())) / self.steps

    @property
    def tokens(self) -> int:
        """Real tokens processed."""
        return sum(each.tokens for each in self.iterations)

    @property
    def seconds(self) -> float:
        """Seconds of the iterations."""
        return sum(each.seconds for each in self.iterations)

    def advance(self, share: float) -> None:
        """Train until ``share`` of all optimiser steps are done; errors as in :meth:`iterate`."""
        while not self.coordinator.idle and self.share < share:
            self.iterate()

    def iterate(self) -> None:
        """One iteration.

        Raises:
            PlaitError: a job failed.
        """
        for event in self.coordinator.advance():
            match event:
                case JobProgress():
                    self.losses[event.job].append(event.loss)
                case GroupStep():
                    self.iterations.append(event)
                case JobResult() if event.state != JobState.FINISHED:
                    raise PlaitError(
                        f"{event.job} {event.state}: {event.reason}", "Every job of a benchmark must finish."
                    )

"""A laboratory: runs jobs through the real coordinator and worker, and keeps what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft_folders import stored_pairs
from torch import Tensor

from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Command,
    Detach,
    Event,
    GroupStep,
    JobEvaluated,
    JobProgress,
    WorkerEvent,
)
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, PlannerSettings, RunSettings
from plait.core.spans import ReplicaSpans
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.local_worker import LocalWorker
from plait.engine.redeployment import Prefer
from plait.engine.worker import Worker, WorkerFacts
from plait.models.base import BaseModel

LOSS_TOLERANCE = 1e-5  # relative, every step
NORM_TOLERANCE = 1e-4  # relative, every step
WEIGHT_TOLERANCE = 1e-4  # of the norm of the adapter's update
TINY = ModelSettings(kind="tiny", dtype="float32", seed=3)
ENGINE = EngineSettings(kernels="grouped", capacity=160, threads=1)
Weights = dict[str, tuple[Tensor, ...]]
VOCABULARY = 250
NARROW = {"llama": ("q_proj", "v_proj"), "gemma2": ("q_proj", "v_proj"), "gpt2": ("c_attn",)}
WIDE = {  # layers whose smaller side is at least 64
    "llama": ("q_proj", "o_proj", "gate_proj", "down_proj"),
    "gemma2": ("q_proj", "o_proj", "gate_proj", "down_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
}


def random_data(spec: DataSpec) -> TokenisedData:
    """Samples of random tokens, about half of them labelled, lengths in a range; from a seed."""
    options = spec.mapping()
    source = np.random.default_rng(options["seed"])

    def split(count: int) -> Split:
        samples = []
        for _ in range(count):
            length = int(source.integers(options["shortest"], options["longest"] + 1))
            labels = source.random(length) < 0.5
            labels[-1] = True
            samples.append(Sample(source.integers(3, VOCABULARY, length).astype(np.int32), labels))
        return Split.of(samples)

    return TokenisedData(spec.options, split(options["train"]), split(options["validation"]))


def random_texts(seed: int, shortest: int, longest: int, *, train: int = 17, validation: int = 3) -> DataSpec:
    return DataSpec.of(
        "random", seed=seed, shortest=shortest, longest=longest, train=train, validation=validation
    )


@dataclass
class Recorder:
    """Stands before a worker: notes each job's weights at its start and before it leaves."""

    worker: LocalWorker
    start: dict[str, Weights] = field(default_factory=dict)
    end: dict[str, Weights] = field(default_factory=dict)
    before: Callable[[LocalWorker, Command], None] = lambda *_: None

    @property
    def facts(self) -> WorkerFacts:
        return self.worker.facts

    def take_spans(self) -> Sequence[ReplicaSpans]:
        return self.worker.take_spans()

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, Detach):
            self.end[command.job] = self._weights(command.job)
        self.before(self.worker, command)
        events = self.worker.execute(command)
        for name in self.worker.bank.blocks:
            self.start.setdefault(name, self._weights(name))
        return events

    def _weights(self, job: str) -> Weights:
        weights = self.worker.bank.weights(job)
        return {site: tuple(tensor.clone() for tensor in own) for site, own in weights.items()}


@dataclass
class History:
    """What a run left: every event, each job's weights at start and end.

    Of another worker than the laboratory's own those at the start are not known, and those at the end are
    what it exported.
    """

    events: list[Event]
    start: dict[str, Weights]
    end: dict[str, Weights]

    def losses(self, job: str) -> list[float]:
        return [event.loss for event in self.events if isinstance(event, JobProgress) and event.job == job]

    def norms(self, job: str) -> list[float]:
        return [
            event.grad_norm for event in self.events if isinstance(event, JobProgress) and event.job == job
        ]

    def evaluations(self, job: str) -> list[float]:
        return [event.loss for event in self.events if isinstance(event, JobEvaluated) and event.job == job]

    def ended(self, job: str) -> JobResult:
        (found,) = [event for event in self.events if isinstance(event, JobResult) and event.job == job]
        return found

    @property
    def steps(self) -> list[GroupStep]:
        """Iterations of the group."""
        return [event for event in self.events if isinstance(event, GroupStep)]

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Of the jobs that were interrupted."""
        ends = [event for event in self.events if isinstance(event, JobResult)]
        return {end.job: end.checkpoint for end in ends if end.checkpoint is not None}

    def before(self, later: History) -> History:
        """This run, which was interrupted, and the one that resumed it, as one."""
        events = [event for event in self.events if not isinstance(event, JobResult)]
        return History([*events, *later.events], self.start, later.end)


def assert_same(found: History, expected: History, jobs: Iterable[JobSpec]) -> None:
    """Promise 1: each job has the losses, norms and weights of another run, within rounding.

    Args:
        expected: a run on the laboratory's own worker.
    """
    for job in jobs:
        name = job.name
        assert found.ended(name).state is JobState.FINISHED
        assert len(found.losses(name)) == job.train.steps
        assert found.losses(name) == pytest.approx(expected.losses(name), rel=LOSS_TOLERANCE)
        assert found.evaluations(name) == pytest.approx(expected.evaluations(name), rel=LOSS_TOLERANCE)
        assert found.norms(name) == pytest.approx(expected.norms(name), rel=NORM_TOLERANCE)
        update = distance(expected.end[name], expected.start[name])
        assert distance(found.end[name], expected.end[name]) <= WEIGHT_TOLERANCE * update


def assert_same_bits(found: History, expected: History, jobs: Iterable[JobSpec]) -> None:
    """Promise 3: each job has the very losses, norms and weights of another run."""
    for job in jobs:
        name = job.name
        assert found.ended(name).state is JobState.FINISHED
        assert len(found.losses(name)) == job.train.steps
        assert found.losses(name) == expected.losses(name)
        assert found.evaluations(name) == expected.evaluations(name)
        assert found.norms(name) == expected.norms(name)
        assert distance(found.end[name], expected.end[name]) == 0.0


def distance(left: Weights, right: Weights) -> float:
    """Frobenius norm of the difference of all of an adapter's tensors."""
    assert left.keys() == right.keys()
    pairs = [(a, b) for site in left for a, b in zip(left[site], right[site], strict=True)]
    return float(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5)


def mixed_group(family: str, *, dropout: float = 0.0, steps: int = 20) -> list[JobSpec]:
    """Seven jobs that differ in rank, alpha, targets, batch size, accumulation, rates, clip and lengths."""
    narrow, wide = NARROW[family], WIDE[family]
    attention = r".*\.(self_attn|attn|attention)\..*"

    def job(name: str, adapter: AdapterSpec, lengths: tuple[int, int], **train: Any) -> JobSpec:
        spec = TrainSpec(steps=steps, **train)
        return JobSpec(name, replace(adapter, dropout=dropout), spec, random_texts(spec.seed, *lengths))

    return [
        job("one", AdapterSpec(1, 4.0, target_modules="all-linear"), (4, 12), lr=2e-3, batch_size=1, seed=1),
        job(
            "three",
            AdapterSpec(3, 3.0, target_modules=narrow),
            (20, 60),
            lr=1e-3,
            batch_size=2,
            accumulation=2,
            clip_norm=0.05,
            weight_decay=0.1,
            seed=2,
        ),
        job(
            "eight",
            AdapterSpec(8, 16.0, target_modules=wide, rslora=True),
            (5, 30),
            lr=2e-3,
            batch_size=4,
            schedule="cosine",
            warmup_steps=3,
            clip_norm=None,
            seed=3,
        ),
        job(
            "sixty-four",
            AdapterSpec(64, 32.0, target_modules=wide),
            (30, 90),
            lr=1e-4,
            batch_size=3,
            lora_plus_ratio=16.0,
            seed=4,
        ),
        job(
            "sixteen",
            AdapterSpec(16, 16.0, target_modules=attention),
            (10, 20),
            lr=3e-4,
            batch_size=2,
            accumulation=3,
            schedule="linear",
            betas=(0.8, 0.95),
            eps=1e-5,  # if keys' gradients are zero but for rounding, AdamW would step by the rounding
            seed=5,
        ),
        job("five", AdapterSpec(5, 10.0, target_modules=narrow[:1]), (40, 41), lr=1e-2, batch_size=1, seed=6),
        job("two", AdapterSpec(2, 8.0, target_modules="all-linear"), (2, 120), lr=1e-3, batch_size=5, seed=7),
    ]


def exported(events: Iterable[Event]) -> dict[str, Weights]:
    """The adapters that jobs left, by job."""
    ends = [event for event in events if isinstance(event, JobResult)]
    return {end.job: {**stored_pairs(end.adapter)} for end in ends if end.adapter is not None}


def with_train(job: JobSpec, **train: Any) -> JobSpec:
    """The job with other settings of its training."""
    return replace(job, train=replace(job.train, **train))


def stopping(turn: int | None) -> Callable[[int, Coordinator], None]:
    """What interrupts a run before this iteration; None: nothing does."""

    def between(now: int, coordinator: Coordinator) -> None:
        if now == turn:
            coordinator.stop()

    return between


@dataclass(frozen=True)
class Kept:
    """Histories of runs that nothing disturbs, made once for all that compare with them; their adapters are
    in the folder."""

    folder: Path
    histories: dict[Any, History] = field(default_factory=dict)


class Laboratory:
    """Runs jobs on one base model.

    Args:
        family: of the tiny model.
        model: that model, frozen.
        folder: for what runs write.
        kept: what :meth:`undisturbed` has made; laboratories on the same models may share it.
    """

    def __init__(self, family: str, model: BaseModel, folder: Path, kept: Kept | None = None) -> None:
        self.model = model
        self.folder = folder
        self.family = family
        self._kept = kept or Kept(folder / "undisturbed")

    def group(self, *, dropout: float = 0.0, steps: int = 20) -> list[JobSpec]:
        """Seven jobs, each unlike the others."""
        return mixed_group(self.family, dropout=dropout, steps=steps)

    def data(self, job: JobSpec) -> TokenisedData:
        """What the job trains on."""
        return random_data(job.data)

    def run(
        self,
        jobs: Sequence[JobSpec],
        *,
        kernels: str = "grouped",
        capacity: int = 160,
        checkpointing: bool = False,
        resume_from: dict[str, Path] | None = None,
        between: Callable[[int, Coordinator], None] = lambda *_: None,
        before: Callable[[LocalWorker, Command], None] = lambda *_: None,
        max_jobs: int | None = None,
        schedule: str = "plait",
        worker: Worker | None = None,
        folder: Path | None = None,
        cluster: ClusterSettings | None = None,
        renew: Callable[[], Worker] | None = None,
        grown: Callable[[], bool] = lambda: False,
        prefer: Prefer | None = None,
    ) -> History:
        """Train the jobs together until none is left; ``between`` is called before each iteration.

        Args:
            worker: another than one on the model here.
        """
        engine = EngineSettings(
            kernels=kernels, capacity=capacity, checkpointing=checkpointing, schedule=schedule
        )
        data = DataCatalogue(random_data)
        worker = worker or Recorder(LocalWorker(self.model, data, engine), before=before)
        planner = PlannerSettings(max_jobs=max_jobs)
        settings = RunSettings(engine=engine, planner=planner, cluster=cluster or ClusterSettings())
        coordinator = Coordinator(
            worker,
            data,
            settings,
            folder=folder or self.folder,
            renew=renew,
            grown=grown,
            prefer=prefer,
        )
        for job in jobs:
            coordinator.submit(job, resume_from=(resume_from or {}).get(job.name))
        events: list[Event] = []
        for turn in range(500):
            between(turn, coordinator)
            if coordinator.idle:
                if isinstance(worker, Recorder):
                    return History(events, worker.start, worker.end)
                return History(events, {}, exported(events))
            events += coordinator.advance()
        raise AssertionError("the run never came to an end")

    def undisturbed(self, jobs: Sequence[JobSpec], *, kernels: str = "grouped", **options: Any) -> History:
        """What :meth:`run` leaves, which is kept."""
        known = self._kept.histories
        key = (self.family, tuple(jobs), kernels, tuple(sorted(options.items())))
        if key not in known:
            folder = self._kept.folder / str(len(known))
            known[key] = self.run(jobs, kernels=kernels, folder=folder, **options)
        return known[key]

    def solo(self, jobs: Sequence[JobSpec], **options: Any) -> dict[str, History]:
        """Each job in a run of its own."""
        return {job.name: self.undisturbed([job], **options) for job in jobs}

"""Searches with rules that end trials: the real loop, study and coordinator, on a worker of curves instead of
a model."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from curve_worker import ADAPTER, CurveWorker, lengths_data, load_lengths
from optuna.trial import FrozenTrial, TrialState
from studies import study_of

from plait.config.overrides import read_request
from plait.core.jobs import JobSpec, TrainSpec
from plait.core.lifecycle import JobResult
from plait.core.messages import Event
from plait.core.settings import EngineSettings, PlannerSettings, RunSettings, SearchSettings, StoppingSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.search.orders import Orders
from plait.search.results import SearchEnd
from plait.search.run import SearchLoop
from plait.search.stopper import make_stopper
from plait.search.study import StudyTrials
from plait.search.trials import Trial

SPACE = read_request(["train.lr=tag(log,interval(1e-5,1e-1))"], {}, {}).space


def curve(job: JobSpec, step: int) -> float:
    """Falls to a floor of its own; curves cross. Multiples of 1/1024, so that sums over samples are exact."""
    far = abs(math.log10(job.train.lr) + 3)
    return round(1024 * (far + 2.0 * (1 + far) ** -2 / (step + 1))) / 1024


def make_job(trial: Trial, steps: int = 8) -> JobSpec:
    lr = trial.values["train.lr"]
    assert isinstance(lr, float)
    own = [text.partition("=")[2] for text in trial.overrides if text.startswith("train.priority=")]
    train = TrainSpec(steps=steps, batch_size=2, lr=lr, priority=int(own[0]) if own else 0)
    return JobSpec(trial.name, ADAPTER, train, lengths_data((3, 5, 8, 4)))


@dataclass
class Notes:
    """Keeps what is reported to it."""

    events: list[Event] = field(default_factory=list)
    judged: dict[str, tuple[str, str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)

    def start_job(self, job: JobSpec, trial: int, outside: str = "") -> float:
        assert job.name == f"trial-{trial:04d}"
        self.outside[job.name] = outside
        return 0.0

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, JobResult) and event.state.ended:
            assert event.job not in self.judged
            assert event.state != "failed" or event.objective is None
            self.judged[event.job] = (event.state, event.reason)

    def lose(self, job: str) -> None:
        self.lost.append(job)

    def commit(self) -> None:
        """What is kept here is as durable as it gets."""


class KilledError(Exception):
    """Stands for SIGKILL."""


@dataclass
class Bench:
    """One search; :meth:`run` is one process of it."""

    folder: Path
    search: SearchSettings
    storage: optuna.storages.BaseStorage = field(default_factory=optuna.storages.InMemoryStorage)
    worker: dict[str, Any] = field(default_factory=dict)
    make_worker: Callable[..., CurveWorker] = CurveWorker
    max_jobs: int | None = None
    steps: Callable[[Trial], int] = lambda _: 8
    budgets: Collection[int] = (8,)  # what ``steps`` may return
    job: Callable[[Trial, int], JobSpec] = make_job
    notes: Notes = field(default_factory=Notes)
    checkpoint_steps: int | None = None
    capacity: int = 16
    alive: int = 100_000  # iterations until the process is killed
    stop_at: int | None = None  # iteration at which it is interrupted
    owner: Callable[[StudyTrials, int], Orders] = lambda _study, _poll: Orders()
    interrupted: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic

    def run(self) -> SearchEnd:
        parallel = self.search.parallel
        run = RunSettings(
            engine=EngineSettings(capacity=self.capacity, checkpoint_steps=self.checkpoint_steps),
            planner=PlannerSettings(max_jobs=min(self.max_jobs or parallel, parallel)),
            search=self.search,
        )
        source = study_of(SPACE, self.search, self.storage, run=run, folder=lambda _: self.folder)
        try:
            engine = Coordinator(
                self.make_worker(**{"curve": curve} | self.worker),
                DataCatalogue(load_lengths),
                run,
                folder=self.folder,
                checkpoints=source.checkpoints_folder,
                clock=self.clock,
            )
            polls, asked = itertools.count(), itertools.count()

            def stop() -> bool:
                poll = next(polls)
                if poll >= self.alive:
                    raise KilledError
                return self.interrupted() or (self.stop_at is not None and poll >= self.stop_at)

            stopper = make_stopper(self.search, self.budgets, source.rungs)
            return SearchLoop(
                source,
                lambda trial: self.job(trial, self.steps(trial)),
                engine,
                self.notes,
                self.search,
                stop,
                stopper,
                lambda: self.owner(source, next(asked)),
            ).run()
        finally:
            source.close()

    @property
    def trials(self) -> list[FrozenTrial]:
        return optuna.load_study(study_name=None, storage=self.storage).get_trials()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.notes.events if isinstance(event, kind)]


def halving(trials: int = 8, parallel: int = 4, **stopping: Any) -> SearchSettings:
    rule = StoppingSettings(**{"kind": "successive_halving", "rungs": (2, 4)} | stopping)
    return SearchSettings(trials=trials, parallel=parallel, sampler="random", stopping=rule)


def states(bench: Bench) -> list[tuple[TrialState, dict[int, float]]]:
    return [(trial.state, trial.intermediate_values) for trial in bench.trials]

"""`plait bench tracking_scale`: what tracking costs a search of many adapters, with SQLite and with a server.

The tracker gets the calls that a search makes of it, without the search: as many adapters and steps as asked.
"""

from __future__ import annotations

import math
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from plait.core.checks import check
from plait.core.errors import ConfigError, StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.messages import (
    Event,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobProgress,
    ModelFitted,
)
from plait.core.settings import RunSettings, TrackingSettings
from plait.tracking.facts import SearchFacts
from plait.tracking.location import locate
from plait.tracking.mlflow_store import Store
from plait.tracking.names import EVAL_LOSS, OBJECTIVE, TRAIN_LOSS
from plait.tracking.tracker import Tracker
from plait.tracking.ui import serving, ui_command
from plait.utils.durations import duration
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count
from plait_bench.joint_side import load_joint_side
from plait_bench.progress import part

TOKENS = 332  # of one step of one adapter: what its curves show, nothing depends on it
EVALUATIONS = 10  # of one adapter
COMMITS = 10  # checkpoints of a group
FITS_EVERY = 64  # iterations, of seconds and of bytes
COEFFICIENTS = 24  # of a fit of bytes, the longer one


@dataclass(frozen=True, slots=True)
class Script:
    """The training that the tracker's calls describe.

    Attributes:
        adapters: in all.
        steps: of each.
        together: adapters of one group; the next group begins when one is done.
        adapter: folder that every adapter leaves behind.
    """

    adapters: int
    steps: int
    together: int
    adapter: Path

    def loss(self, adapter: int, step: int) -> float:
        """Training loss of an adapter after a step: falling, with repeatable noise."""
        return 4.0 / math.sqrt(step) + 0.1 * math.sin(step * (adapter + 1)) + 1.0

    def kept(self, points: int) -> set[int]:
        """Steps whose points are sent, if ``points`` are asked for."""
        stride, evaluated = -(-self.steps // points), max(1, self.steps // EVALUATIONS)
        return {
            step
            for step in range(1, self.steps + 1)
            if step in (1, self.steps) or step % stride == 0 or step % evaluated == 0
        }

    def events(self, job: str, adapter: int, step: int) -> Iterator[Event]:
        """The events of one adapter's step."""
        tokens, seconds = TOKENS * step, 0.25 * step
        yield JobProgress(job, step, self.loss(adapter, step), 1.0 / step, 1e-4, tokens, seconds, 1400.0)
        if step % max(1, self.steps // EVALUATIONS) == 0:
            yield JobEvaluated(job, step, self.loss(adapter, step) + 0.2, 4 * TOKENS)


class Caller:
    """Makes the tracker's calls and measures how long they hold up the thread that trains.

    Args:
        tracker: with its search begun.
        jobs: whose settings the adapters have, in turns.
        script: what is trained.
    """

    def __init__(self, tracker: Tracker, jobs: Sequence[JobSpec], script: Script) -> None:
        self._tracker = tracker
        self._jobs = [
            replace(jobs[at % len(jobs)], name=f"adapter-{at:04d}") for at in range(script.adapters)
        ]
        self._script = script
        self._iteration = 0
        self.seconds = 0.0  # in the tracker's calls, waiting for anything included

    def train(self, start: int, stop: int) -> None:
        """Train the adapters from ``start`` to ``stop``, a group after the other."""
        for first in range(start, stop, self._script.together):
            self._group(range(first, min(first + self._script.together, stop)))

    def _timed(self, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.seconds += time.perf_counter() - started

    def _group(self, adapters: range) -> None:
        script, tracker = self._script, self._tracker
        jobs = {at: self._jobs[at] for at in adapters}
        names = tuple(job.name for job in jobs.values())
        for at, job in jobs.items():
            self._timed(partial(tracker.start_job, job, at))
            self._handle([JobAdmitted(job, 0, script.steps, "group-0")])
        for step in range(1, script.steps + 1):
            self._iteration += 1
            tokens = TOKENS * len(jobs)
            events = [event for at, job in jobs.items() for event in script.events(job.name, at, step)]
            each = (TOKENS,) * len(jobs)
            iteration = GroupStep(
                "group-0", self._iteration, names, 2, tokens, 2.0, 2**30, 2048, each, 1.9, 2**30
            )
            self._handle([*events, iteration, *self._fits()])
            if step % max(1, script.steps // COMMITS) == 0:
                self._timed(tracker.commit)
        for at, job in jobs.items():
            self._end(at, job.name)

    def _fits(self) -> Iterator[ModelFitted]:
        """The fits that follow an iteration."""
        if self._iteration % FITS_EVERY == 0:
            for target, terms in (("seconds", COEFFICIENTS // 4), ("bytes", COEFFICIENTS)):
                found = tuple((f"term {at}", 1.0 / (self._iteration + at)) for at in range(terms))
                yield ModelFitted(target, self._iteration, 256, found, 0.01, 0.02, 0.03, 0.05)

    def _end(self, at: int, job: str) -> None:
        script = self._script
        loss, tokens = script.loss(at, script.steps) + 0.2, TOKENS * script.steps
        seconds = 0.25 * script.steps
        measured = (script.steps, "", loss, tokens, seconds, 900.0, script.adapter)
        self._handle([JobResult(job, JobState.FINISHED, *measured, values=(loss,))])

    def _handle(self, events: Sequence[Event]) -> None:
        def call() -> None:
            for event in events:
                self._tracker.handle(event)

        self._timed(call)


StoreKind = Literal["sqlite", "server"]
MEASURED_STEPS = 5
ADAPTER_BYTES = 2**16
USUAL_SECONDS = {"sqlite": 2.5e-4, "server": 3.5e-4}  # for a step of one adapter: what is said beforehand
SHARE = 2  # % of a run's time that tracking may take


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``tracking_scale``.

    Attributes:
        adapters: in all.
        steps: of each.
        together: adapters of one group.
        edge: how many of the first and of the last adapters are compared.
        stores: "sqlite" (the default store), "server" (an MLflow server's process on this machine).
        step_seconds: what one adapter's step takes; None: the jobs are trained for some steps here and the
            fastest joint step is shared out among them. On a machine that does other things it comes out
            too long.
    """

    adapters: Count = 500
    steps: Count = 1000
    together: Count = 8
    edge: Count = 100
    stores: tuple[StoreKind, ...] = ("sqlite", "server")
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        check(self, OPTIONS)
        if 2 * self.edge > self.adapters:
            raise ConfigError(
                f"bench.options.edge={self.edge}, adapters={self.adapters}",
                "First and last adapters must not be the same ones.",
            )


@dataclass(slots=True)
class Cost:
    """Seconds so far: of the thread that trains, of the writer's CPU, of the server's CPU, of the clock."""

    calls: float = 0.0
    writer: float = 0.0
    server: float = 0.0
    clock: float = 0.0

    @property
    def total(self) -> float:
        """What a search has less of."""
        return self.calls + self.writer + self.server

    def since(self, before: Cost) -> Cost:
        """The difference."""
        return Cost(
            self.calls - before.calls,
            self.writer - before.writer,
            self.server - before.server,
            self.clock - before.clock,
        )


@benchmark("tracking_scale", Options)
def tracking_scale(settings: RunSettings, jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Tell the tracker of every step, wait until the store has it all, and check that it has.

    Raises:
        ConfigError: an option that is unknown or out of range.
        StorageError: the store does not hold what was sent.
    """
    step_seconds = asked.step_seconds or _step_seconds(settings, jobs[: asked.together])
    figures = [
        Figure(
            "one step of one adapter",
            1000 * step_seconds,
            "ms",
            "computed" if asked.step_seconds else "measured",
            note="as given" if asked.step_seconds else "fastest joint step, divided among its adapters",
        )
    ]
    whole = sum(USUAL_SECONDS[store] for store in asked.stores) * asked.adapters * asked.steps
    part(f"about {duration(whole)} in total, on two otherwise idle cores")
    for store in asked.stores:
        with tempfile.TemporaryDirectory(prefix="plait-tracking-") as folder:
            figures += _measure(settings, jobs, asked, store, Path(folder), step_seconds)
    hours = asked.adapters * asked.steps * step_seconds / 3600
    return Report(
        "tracking_scale",
        tuple(figures),
        (
            f"{asked.adapters} adapters of {asked.steps} steps, {asked.together} at once; "
            f"tracking.points={settings.tracking.points}.",
            f"Shares are of a run of {hours:.1f} hours: all steps at the seconds above, one after the other. "
            "The calls are real and made without a pause; nothing is trained at the same time.",
            f"An adapter's folder has {ADAPTER_BYTES // 1024} KiB in this benchmark.",
        ),
    )


def _step_seconds(settings: RunSettings, jobs: Sequence[JobSpec]) -> float:
    """Seconds that one adapter adds to a joint step, here and now."""
    side = load_joint_side(settings, jobs)
    capacity = settings.engine.capacity_or_usual
    with side.attached(jobs):
        _warm_up, *seconds = [
            side.timed_step(jobs, side.pack(jobs, step, capacity), step)
            for step in range(1, MEASURED_STEPS + 2)
        ]
    return min(seconds) / len(jobs)


def _measure(
    settings: RunSettings,
    jobs: Sequence[JobSpec],
    asked: Options,
    store: str,
    folder: Path,
    step_seconds: float,
) -> list[Figure]:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(bytes(ADAPTER_BYTES))
    script = Script(asked.adapters, asked.steps, asked.together, adapter)
    file = f"sqlite:///{folder / 'mlflow.db'}"
    with _served(file, folder) if store == "server" else nullcontext((file, None)) as (uri, server):
        tracking = replace(settings.tracking, uri=uri, root=folder / "runs", experiment="tracking_scale")
        chosen = replace(settings, tracking=tracking)
        edges = _costs(chosen, jobs, script, asked.edge, store, server)
        part(f"{store}: reading everything back")
        values = _check(tracking, script)
    return _figures(store, edges, values, asked, step_seconds)


def _costs(
    settings: RunSettings,
    jobs: Sequence[JobSpec],
    script: Script,
    edge: int,
    store: str,
    server: psutil.Process | None,
) -> list[Cost]:
    """What it took until the store had the first ``edge`` adapters, those between and the last ``edge``, each
    with what was before; the beginning first."""
    costs: list[Cost] = []
    with Tracker(settings.tracking) as tracker:
        tracker.start_search(SearchFacts("tracking_scale", settings))
        tracker.flush()
        caller = Caller(tracker, jobs, script)
        costs.append(Cost(0.0, tracker.writer_seconds, _cpu(server), time.perf_counter()))
        pace = USUAL_SECONDS[store] * script.steps  # seconds for one adapter
        for start, stop in _parts(script.adapters, edge):
            left = duration(pace * (script.adapters - start))
            part(f"{store}: adapters {start} to {stop} of {script.adapters}, about {left} left of this store")
            caller.train(start, stop)
            tracker.flush()
            seconds = caller.seconds
            costs.append(Cost(seconds, tracker.writer_seconds, _cpu(server), time.perf_counter()))
            pace = (costs[-1].clock - costs[0].clock) / stop
    return costs


def _parts(adapters: int, edge: int) -> list[tuple[int, int]]:
    return [(0, edge), (edge, adapters - edge), (adapters - edge, adapters)]


def _cpu(server: psutil.Process | None) -> float:
    """CPU seconds of a server's processes."""
    if server is None:
        return 0.0
    times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _check(tracking: TrackingSettings, script: Script) -> int:
    """Make sure that the store has every run, every point of its loss and its last values.

    Returns:
        Metric values of training losses in the store.

    Raises:
        StorageError: it has not.
    """
    store = Store(locate(tracking), tracking.experiment)
    (parent,) = store.searches("tracking_scale")
    children = store.children(parent.info.run_id)
    kept, values = script.kept(tracking.points), 0
    for adapter in range(script.adapters):
        run = children[adapter]
        history = store.client.get_metric_history(run.info.run_id, TRAIN_LOSS)
        wanted = {step: script.loss(adapter, step) for step in kept}
        last = script.loss(adapter, script.steps)
        shown = [run.data.metrics.get(key) for key in (TRAIN_LOSS, EVAL_LOSS, OBJECTIVE)]
        found = {point.step: point.value for point in history}
        if found != wanted or len(history) != len(wanted) or shown != [last, last + 0.2, last + 0.2]:
            raise StorageError(
                f"{run.info.run_name}: {len(history)} points of {len(wanted)}, last values {shown}",
                "The store must contain all points that were sent.",
            )
        values += len(history)
    return values


def _figures(
    store: str, costs: Sequence[Cost], values: int, asked: Options, step_seconds: float
) -> list[Figure]:
    start, whole = costs[0], costs[-1]
    first, last = costs[1].since(start), costs[-1].since(costs[-2])
    seconds = asked.adapters * asked.steps * step_seconds
    times = [
        ("the thread that trains", whole.calls - start.calls),
        ("the writer's CPU", whole.writer - start.writer),
        *([("the server's CPU", whole.server - start.server)] if store == "server" else []),
        ("tracking in total", whole.total - start.total),
    ]
    training = Baseline(seconds, "training, at the seconds of one step", at_most=SHARE / 100)
    figures = [
        Figure(f"{store}: {name}", 100 * each / seconds, "% of the run", "measured") for name, each in times
    ]
    figures += [Figure(f"{store}: {name}", each, "s", "measured") for name, each in times[:-1]]
    figures.append(Figure(f"{store}: {times[-1][0]}", times[-1][1], "s", "measured", training))
    steps = asked.adapters * asked.steps
    return [
        *figures,
        Figure(f"{store}: calls of one step", 1e6 * (whole.calls - start.calls) / steps, "µs", "measured"),
        Figure(f"{store}: until everything was sent", whole.clock - start.clock, "s", "measured"),
        Figure(
            f"{store}: shortest step of which it takes {SHARE} %",
            1000 * (whole.total - start.total) / steps / (SHARE / 100),
            "ms",
            "measured",
        ),
        Figure(
            f"{store}: tracking of the last {asked.edge} adapters",
            last.total,
            "s",
            "measured",
            Baseline(first.total, f"tracking of the first {asked.edge} adapters"),
        ),
        Figure(
            f"{store}: losses in the store", values, "points", "measured", note=f"of {steps:,} steps; checked"
        ),
    ]


@contextmanager
def _served(file: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of an MLflow server in a separate process, with this SQLite file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--port", str(port), "--artifacts-destination", str(folder / "kept")]
    command = ui_command(TrackingSettings(uri=file, root=folder), arguments)
    command.environment.pop("MLFLOW_DEFAULT_ARTIFACT_ROOT", None)  # it keeps artifacts itself
    with (folder / "log").open("wb") as log, serving(command, log) as (server, answers):
        if not answers:
            words = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise StorageError(
                f"{command.url}: no answer ({words[-1] if words else ''})",
                "MLflow's server must start on this machine.",
            )
        yield command.url, psutil.Process(server.pid)

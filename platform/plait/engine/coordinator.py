"""The coordinator: decides which jobs train, what goes through the model together, and when each steps.

Pure Python. It owns no tensor: it sends commands to a worker and turns what comes back into events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from plait.engine.accounting import NANOSECONDS
from plait.engine.admission import Admission
from plait.engine.catalogue import DataCatalogue
from plait.engine.ledger import Ledger, Outcome, Tally, Worker
from plait.engine.live import LiveJob
from plait.engine.messages import (
    Attach,
    Command,
    Detach,
    Evaluate,
    Event,
    Export,
    Generate,
    GenerateJob,
    GroupStep,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobProgress,
    RunMicrobatches,
    SaveState,
    StepJob,
    StepJobs,
)
from plait.engine.order import DataOrder
from plait.errors import ConfigError
from plait.jobs import JobSpec
from plait.planner.packing import pack
from plait.plans import GlobalBatch, Group, Microbatch, Plan, Replica
from plait.settings import RunSettings

GROUP = "group-0"
INTERRUPTED = "interrupted"


class Coordinator:
    """Trains jobs together on one worker, an iteration at a time.

    Jobs join and leave between iterations. In each one, every live job's next global batch is packed into
    microbatches with the others', runs through the model, and each job steps its own optimiser.

    Args:
        worker: owns model and adapters.
        data: the jobs' data sets; an in-process worker shares it.
        settings: of the run.
        folder: where finished adapters (``adapters/``) and interrupted jobs (``checkpoints/``) go.
        clock: seconds, rising.
    """

    def __init__(
        self,
        worker: Worker,
        data: DataCatalogue,
        settings: RunSettings,
        *,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = Ledger(worker)
        self._tile = worker.facts.tile
        self._admission = Admission(worker.facts, settings)
        self._data = data
        self._capacity = settings.engine.capacity
        self._folder = folder
        self._clock = clock
        self._waiting: list[LiveJob] = []
        self._live: dict[str, LiveJob] = {}
        self._arrivals = count()
        self._iterations = count(1)
        self._stopping = False
        self._joined: list[str] = []
        self._chosen = dict(worker.facts.chosen)

    # ---- what is asked from outside -------------------------------------------------------------------

    def submit(self, job: JobSpec, *, resume_from: Path | None = None) -> None:
        """Queue a job, fresh or from a saved state.

        Raises:
            ConfigError: a job of this name waits or trains already.
            InputError: its data, targets or rank cannot be used, or it does not fit into memory alone.
        """
        if any(job.name == other.name for other in self._all()):
            raise ConfigError(f"job {job.name!r}", "A job's name is its own while it waits or trains.")
        data = self._data.of(job.data)
        order = DataOrder.of(job.train, len(data.train))
        longest = max(int(split.lengths.max(initial=0)) for split in (data.train, data.validation))
        demand = self._admission.demand(job.adapter, longest)
        arrival = next(self._arrivals)
        self._waiting.append(LiveJob(job, data, order, demand, arrival, self._clock(), resume_from))
        self._waiting.sort(key=lambda waiting: (-waiting.spec.train.priority, waiting.arrival))

    def cancel(self, job: str, reason: str = "cancelled") -> None:
        """Stop a waiting or live job at the next iteration's boundary.

        Raises:
            ConfigError: there is no such job.
        """
        for each in self._all():
            if each.name == job:
                each.cancelled = reason
                return
        raise ConfigError(f"job {job!r}", "Only a job that waits or trains can be cancelled.")

    def stop(self) -> None:
        """At the next boundary, save every live job and end all with the reason "interrupted"."""
        self._stopping = True

    def places(self, most: int = 1024) -> int:
        """How many more jobs would start at once, were they as large as the largest known; at most ``most``.

        At least 1 while no job is known, so that submitting one says what is wrong with it.
        """
        if self._stopping:
            return 0
        known = [job.demand for job in self._all()]
        if not known:
            return max(1, self._admission.room([], self._admission.usual, most))
        return self._admission.room(known, max(known, key=lambda demand: demand.bytes), most)

    def plan(self) -> Plan:
        """What trains, as far as it is known: the jobs admitted so far, and what was measured and chosen."""
        group = Group(tuple(self._joined), self._capacity, self._tile)
        replica = Replica(devices=(self._chosen.get("device", "cpu"),))
        return Plan((replica,), (group,), choices={**self._chosen, "capacity": self._capacity})

    @property
    def idle(self) -> bool:
        """Whether no job waits or trains."""
        return not self._waiting and not self._live

    @property
    def device_ns(self) -> int:
        """Device time of all commands so far, in nanoseconds: the sum of what was attributed to jobs."""
        return self._ledger.device_ns

    def advance(self) -> list[Event]:
        """One iteration: end what was stopped, admit what fits, train one step of every live job."""
        if self._stopping:
            return self._interrupt()
        events = [*self._end_cancelled(), *self._admit()]
        if any(not job.done for job in self._live.values()):
            events += self._train()
        return [*events, *self._evaluate(), *self._finish()]

    # ---- joining and leaving --------------------------------------------------------------------------

    def _all(self) -> list[LiveJob]:
        return [*self._live.values(), *self._waiting]

    def _admit(self) -> list[Event]:
        events: list[Event] = []
        while self._waiting:
            job = self._waiting[0]
            if not self._admission.fits([*(live.demand for live in self._live.values()), job.demand]):
                break
            del self._waiting[0]
            self._live[job.name] = job
            outcome = self._send(Attach(job.spec, job.data.digest, job.resume_from))
            if job.name in outcome.attached:
                job.cursor = outcome.attached[job.name].cursor
                self._joined.append(job.name)
                events.append(JobAdmitted(job.spec, job.step, job.order.steps, GROUP))
            events += self._end_failed(outcome)
        return events

    def _end_cancelled(self) -> list[Event]:
        return [self._end(job, "stopped", job.cancelled) for job in self._all() if job.cancelled is not None]

    def _end_failed(self, outcome: Outcome) -> list[Event]:
        return [self._end(self._live[name], "failed", reason) for name, reason in outcome.failures.items()]

    def _interrupt(self) -> list[Event]:
        events = []
        for job in self._all():
            checkpoint = None
            if job.name in self._live:
                checkpoint = self._folder / "checkpoints" / job.name / f"step-{job.step:08d}"
                self._send(SaveState(job.name, checkpoint, job.cursor))
            events.append(self._end(job, "stopped", INTERRUPTED, checkpoint=checkpoint))
        return events

    def _end(
        self,
        job: LiveJob,
        state: str,
        reason: str,
        *,
        adapter: Path | None = None,
        checkpoint: Path | None = None,
    ) -> Event:
        if job.name in self._live:
            self._send(Detach(job.name))
            del self._live[job.name]
        else:
            self._waiting.remove(job)
        return job.ended(state, reason, self._clock(), adapter=adapter, checkpoint=checkpoint)

    # ---- one iteration --------------------------------------------------------------------------------

    def _send(self, command: Command) -> Outcome:
        return self._ledger.send(command, self._live)

    def _pack(self, batches: Sequence[GlobalBatch]) -> tuple[Microbatch, ...]:
        return pack(batches, capacity=self._capacity, tile=self._tile)

    def _train(self) -> list[Event]:
        """One global batch of every live job through the model, then the step of each that may."""
        started = self._clock()
        jobs = {name: job for name, job in self._live.items() if not job.done}
        run = self._send(RunMicrobatches(self._pack([job.next_batch() for job in jobs.values()])))
        due = [
            StepJob(name, job.step + 1, job.next_rate())
            for name, job in jobs.items()
            if name not in run.failures
        ]
        stepped = self._send(StepJobs(tuple(due)))
        seconds = self._clock() - started
        events = [*self._end_failed(run), *self._end_failed(stepped)]
        for step in due:
            if step.job in stepped.steps:
                job, tally = jobs[step.job], run.tallies[step.job]
                job.advance(tally.tokens)
                events.append(_progress(job, tally, stepped.steps[step.job].grad_norm, step.lr, seconds))
        events.append(
            GroupStep(
                group=GROUP,
                iteration=next(self._iterations),
                jobs=tuple(jobs),
                microbatches=run.microbatches,
                tokens=run.tokens,
                seconds=seconds,
                peak_bytes=run.peak_bytes,
                capacity=self._capacity,
            )
        )
        return events

    def _evaluate(self) -> list[Event]:
        """Validation losses of all jobs that are due, in joint forward passes."""
        due = [job for job in self._live.values() if job.evaluation_due]
        if not due:
            return []
        outcome = self._send(Evaluate(self._pack([job.validation_batch() for job in due])))
        events = self._end_failed(outcome)
        for job in due:
            if job.name not in outcome.failures:
                tally = outcome.tallies[job.name]
                job.eval_loss = tally.mean
                events.append(JobEvaluated(job.name, job.step, tally.mean, tally.tokens))
        return events

    def _finish(self) -> list[Event]:
        """Generate with, export and let go every job whose budget is spent."""
        done = [job for job in self._live.values() if job.done]
        events = self._generate(done)
        for job in done:
            adapter = self._folder / "adapters" / job.name
            self._send(Export(job.name, adapter))
            events.append(self._end(job, "finished", "budget spent", adapter=adapter))
        return events

    def _generate(self, jobs: Sequence[LiveJob]) -> list[Event]:
        """Answers to the validation prompts of every job that asks for them, together, judged."""
        asking: dict[int, list[LiveJob]] = {}
        for job in jobs:
            limit = self._data.generation_limit(job.spec.data)
            if limit is not None and len(job.data.validation) > 0:
                asking.setdefault(limit, []).append(job)
        events: list[Event] = []
        for limit, group in asking.items():
            wanted = [GenerateJob(job.name, tuple(range(len(job.data.validation)))) for job in group]
            answers = self._send(Generate(tuple(wanted), limit)).generated
            for job in group:
                scores = self._data.scores(job.spec.data, job.data, answers[job.name])
                events.append(JobGenerated(job.name, job.step, sum(scores) / len(scores)))
        return events


def _progress(job: LiveJob, tally: Tally, grad_norm: float, rate: float, seconds: float) -> JobProgress:
    return JobProgress(
        job=job.name,
        step=job.step,
        loss=tally.mean,
        grad_norm=grad_norm,
        lr=rate,
        tokens=job.cursor.tokens,
        device_seconds=job.cursor.device_ns / NANOSECONDS,
        tokens_per_s=tally.tokens / seconds if seconds > 0 else 0.0,
    )

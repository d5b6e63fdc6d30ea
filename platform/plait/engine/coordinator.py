"""The coordinator: decides which jobs train, what goes through the model together, and when each one steps.

It is pure Python and owns no tensors: it sends commands to a worker through the protocol
:class:`~plait.engine.worker.Worker`, and turns the answers into events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from plait.core.errors import ConfigError, GatheringInterruptedError, LostProcessError, ShortStageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobState, PauseReason
from plait.core.messages import (
    Attach,
    Attached,
    Command,
    Detach,
    Event,
    JobAdmitted,
    JobPaused,
    Notice,
    RunSchedule,
)
from plait.core.plans import Choices, Group, Plan, Prediction
from plait.core.rungs import step_of
from plait.core.settings import RunSettings
from plait.cost.profile_store import Profile
from plait.engine.admission import Admission
from plait.engine.catalogue import DataCatalogue
from plait.engine.checkpoints import Checkpointer, checkpoint_name
from plait.engine.flights import flights_of
from plait.engine.iteration import Finishing, answered, evaluate, group_step, progress, traced
from plait.engine.jobs import LiveJob, Roster
from plait.engine.ledger import Ledger, Outcome
from plait.engine.packer import Packer
from plait.engine.predictions import Expected, Predictions
from plait.engine.redeployment import Prefer, Redeployment
from plait.engine.replica_times import on_one_clock, times_between
from plait.engine.replicas import dispatch_time, replicas_of
from plait.engine.restarts import Restarts
from plait.engine.schedules import by_completion
from plait.engine.steps import DataOrder
from plait.engine.worker import Worker

INTERRUPTED = "interrupted"
GROUP = "group-0"  # all jobs that a process trains


class Coordinator:
    """Trains jobs together on one worker, one iteration at a time.

    Jobs join and leave between iterations. In an iteration, the next global batches of all live jobs are
    packed into microbatches together and run through the model, and each job steps its own optimiser. A job
    that waits at a rung, is paused or is preempted is saved, detached from the worker, and later resumed
    exactly.

    Args:
        folder: folder for finished adapters (``adapters/``) and checkpoints (``checkpoints/``).
        checkpoints: folder for checkpoints instead of ``checkpoints/``.
        commit: makes everything recorded so far durable; called before a checkpoint is taken.
        renew: makes another worker if this one's processes are lost; None: that ends the run.
        grown: whether the worker that ``renew`` makes now would have more processes than this one.
        prefer: tells ``renew`` how many processes each replica should have.

    Attributes:
        restarts: after losses of the worker's processes.
    """

    def __init__(
        self,
        worker: Worker,
        data: DataCatalogue,
        settings: RunSettings,
        *,
        folder: Path,
        checkpoints: Path | None = None,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.monotonic,
        commit: Callable[[], None] = lambda: None,
        renew: Callable[[], Worker] | None = None,
        grown: Callable[[], bool] = lambda: False,
        prefer: Prefer | None = None,
    ) -> None:
        self._settings, self._profile, self._renew, self._grown = settings, profile, renew, grown
        self.restarts = Restarts(settings.cluster.restarts, clock)
        self._lost: LostProcessError | None = None  # from then on until there is another worker
        self._redeployment = Redeployment(settings, profile, prefer)
        self._ledger = Ledger(worker)
        self._admission = Admission(worker.facts, settings, profile)
        self._predictions = Predictions(worker.facts, self._admission, profile, folder)
        self._roster = Roster(self._admission, settings.planner.max_jobs)
        self._data = data
        self._finishing = Finishing(data, folder / "adapters", self._send, clock)
        self._use(worker)
        self._clock = clock
        self.checkpointer = Checkpointer(
            settings.engine, checkpoints or folder / "checkpoints", self._send, clock, commit
        )
        self._arrivals = count()
        self._iterations = count(1)
        self._ended = clock()  # when the last step was done
        self._stopping = False
        self._joined: list[str] = []
        self._chosen: Choices = {  # as the search resumes with them, whichever processes are lost meanwhile
            **worker.facts.chosen,
            "processes": self._processes,
            "speeds": " ".join(str(each.speed) for each in self._replicas),
        }

    def _use(self, worker: Worker) -> None:
        """Send commands to this worker from now on.

        Raises:
            ProcessError: a job has a sample that fits only into a replica that is missing.
        """
        facts = worker.facts
        self._worker = self._ledger.worker = worker
        self._replicas = replicas_of(facts, self._settings, self._profile)
        self._redeployment.use(facts, self._replicas)
        self._admission.take_replicas(facts, self._replicas, self._redeployment.widest)
        self._predictions.take_facts(facts)
        self._packer = Packer(self._replicas, dispatch_time(facts, self._profile))
        self._flights = flights_of(facts, self._settings, self._packer, self._predictions.expect)
        for job in self._roster.all():  # a shard of the moments is larger if there are fewer
            job.demand = self._admission.demand_again(job.spec.adapter, job.demand)

    # ---- commands of the search ------------------------------------------------------------------------

    def submit(
        self,
        job: JobSpec,
        *,
        resume_from: Path | None = None,
        warm_from: Path | None = None,
        rungs: Collection[int] = (),
        measured: bool = False,
        recorded: float = 0.0,
    ) -> None:
        """Queue a job, fresh or from a checkpoint.

        Args:
            warm_from: adapter or checkpoint whose weights it starts with if it has no checkpoint yet.
            rungs: at which it waits for ``resume(job, AT_RUNG)``.
            measured: whether the validation loss is measured at every rung.
            recorded: device seconds that earlier processes recorded for it.

        Raises:
            ConfigError: a job with this name already waits or trains.
            InputError: its data, targets or rank cannot be used, or it does not fit into memory alone.
            ProcessError: a sample of it fits only into a replica that is missing.
        """
        if self._roster.find(job.name) is not None:
            raise ConfigError(f"job {job.name!r}", "Another job of this name is waiting or training.")
        data = self._data.of(job.data)
        order = DataOrder.over(job.train, data.train)
        demand = self._admission.demand(job.adapter, self._data.longest(job.data), job.train.global_batch)
        new = LiveJob(job, data, order, demand, next(self._arrivals), self._clock(), resume_from)
        new.rungs = frozenset(step_of(rung, order.steps) for rung in rungs)
        new.measured, new.warm_from, new.recorded = measured, warm_from, recorded
        self._roster.queue(new)

    def cancel(self, job: str, reason: str, *, state: JobState = JobState.STOPPED) -> None:
        """End a job in this state at the next boundary, wherever it is.

        Raises:
            ConfigError: there is no such job.
        """
        self._find(job).cancelled = state, reason

    def pause(self, job: str) -> None:
        """At the next boundary, save a job and free its slot, until :meth:`resume`.

        Raises:
            ConfigError: there is no such job.
        """
        self._find(job).holds.add(PauseReason.BY_USER)

    def resume(self, job: str, reason: PauseReason = PauseReason.BY_USER) -> None:
        """Resume a job that the user paused, or let one pass the rung at which it waits (``AT_RUNG``).

        It returns at the next boundary at which a slot is free; a job that has not lost its slot keeps it.

        Raises:
            ConfigError: there is no such job.
        """
        self._find(job).release(reason)

    def _find(self, name: str) -> LiveJob:
        job = self._roster.find(name)
        if job is None:
            raise ConfigError(f"job {name!r}", "No job of this name is waiting or training.")
        return job

    def stop(self) -> None:
        """At the next boundary, save every live job and end all jobs as paused, with the reason
        "interrupted"."""
        self._stopping = True

    def free_slots(self, most: int = 1024) -> int:
        """How many more jobs would start immediately if they were as large as the largest known, up to
        ``most``.

        At least 1 while no job waits for a slot, so that submitting a job reports what is wrong with it.
        """
        return 0 if self._stopping else self._roster.free_slots(most)

    @property
    def _processes(self) -> int:
        """Processes that train: those of all stages of all replicas."""
        return sum(each.tp * each.pp for each in self._replicas)

    def plan(self) -> Plan:
        """The plan as far as it is known: the jobs admitted so far, and what was measured and chosen."""
        live = [job.demand for job in self._live.values()]
        expected = Prediction(bytes=self._admission.predicted(live))
        group = Group(tuple(self._joined), self._packer.capacity, predicted=expected)
        choices: Choices = {
            **self._chosen,
            "capacity": self._packer.capacity,
            "packing repeats": self._packer.repeats,
        }
        return Plan(self._replicas, (group,), choices=choices)

    @property
    def account(self) -> str:
        """What checkpoints have cost so far, next to what lost processes have; "" if there were none."""
        return self.restarts.account(self.checkpointer.count, self.checkpointer.seconds)

    @property
    def idle(self) -> bool:
        """Whether no job waits, trains or is paused."""
        return not self._roster.all()

    @property
    def device_ns(self) -> int:
        """Device time of all commands so far, in nanoseconds, which is the sum over all jobs."""
        return self._ledger.device_ns

    def settle(self) -> list[Event]:
        """Carry out requests since the last boundary: end cancelled jobs, pause waiting ones.

        Part of :meth:`advance`; separate, so that the search knows what ended before it fills the free slots.
        """
        return [] if self._stopping else self._outlive(self._settle())

    def advance(self) -> list[Event]:
        """One iteration: end what was stopped, admit what fits, train one step of every live job.

        If processes of the worker are lost, the next call replaces the worker: meanwhile all jobs wait, to be
        trained again from their last checkpoints.

        Raises:
            LostProcessError: too many were lost, or the worker cannot be replaced.
            ProcessError: its replacement is too small for a job that trained before.
        """
        if self._stopping:
            return self._interrupt()
        lost, self._lost = self._lost, None
        if lost is not None:
            return self._outlive(self._come_back())
        return self._outlive(self._iterate())

    def _settle(self) -> Iterator[Event]:
        roster = self._roster
        for job in roster.all():
            if job.cancelled is not None and not job.in_flight:
                yield self._end(job, *job.cancelled)
        for job in [*roster.live.values(), *roster.waiting]:
            if job.holds and not job.in_flight:
                yield from self._pause(job, min(job.holds), roster.pause)  # a rung before an order
        for job in list(roster.paused.values()):
            if not job.holds:
                roster.queue(job)

    def _iterate(self) -> Iterator[Event]:
        if self._grown():
            yield from self._move()
        # A cancelled job may have been adopted by another process, which then owns its checkpoints.
        if any(self.checkpointer.due(job) for job in self._live.values()):
            yield from self._land()
        yield from self.checkpointer.save_due(job for job in self._live.values() if job.cancelled is None)
        yield from self._settle()
        yield from self._admit()
        yield from self._train()
        yield from self._evaluate()
        yield from self._finish()
        yield from traced(on_one_clock(self._worker.take_spans()))

    # ---- lost processes --------------------------------------------------------------------------------

    def _outlive(self, events: Iterable[Event]) -> list[Event]:
        """All events, up to the loss of a process if there is one: then all live jobs fall back.

        Raises:
            LostProcessError: as :meth:`advance`.
        """
        before, found = self._lost, list[Event]()
        try:
            for event in events:
                found.append(event)
        except LostProcessError as error:
            self._lost = self._lost or error
        if isinstance(self._lost, GatheringInterruptedError):
            return found  # the search stops at this boundary
        if self._lost is not None and before is None:
            # A smaller group follows, which may be repeated; where none trains, none is smaller.
            short = isinstance(self._lost, ShortStageError) and bool(self._live)
            if self._renew is None or not (short or self.restarts.another()):
                raise self._lost
            found += self._shrink_and_resume(self._lost.value) if short else self._fall_back()
            found.append(Notice(f"{self._lost.value}. Restarting with the processes that come back ..."))
        return found

    def _fall_back(self) -> list[Event]:
        """Put all live jobs back to their last checkpoints; what came after is taken back."""
        fallen = list(self._live.values())
        for job in fallen:
            self.restarts.steps += self.checkpointer.fall_back(job)
            self._finishing.ended(job.name)
            self._roster.queue(job)
        return [_paused(job, PauseReason.LOST) for job in fallen]

    def _shrink_and_resume(self, detail: str) -> list[Event]:
        """All jobs fall back, and one fewer trains from now on; one that was alone fails."""
        jobs = list(self._live.values())
        if len(jobs) > 1:
            self._roster.shrink()
        events = self._fall_back()
        if len(jobs) == 1:
            reason = f"out of memory, with no other job training: {detail}"
            events.append(self._end(jobs[0], JobState.FAILED, reason))
        return events

    def _come_back(self) -> Iterator[Event]:
        """Have another worker in the place of the lost one."""
        seconds = self._change_worker()
        self.restarts.seconds += seconds
        count = self._processes
        who = "1 process trains" if count == 1 else f"{count} processes train"
        yield Notice(f"{who} again after {seconds:.1f} s")

    def _move(self) -> Iterator[Event]:
        """Continue on all available processes, in other replicas: all jobs are saved, and move there as
        they are."""
        yield from self._land()
        jobs = list(self._live.values())
        saved, notices = self.checkpointer.save(jobs, urgent=False)
        yield from notices
        if any(_older(job, saved.get(job.name)) for job in jobs):
            return  # the disk refuses: later
        for job in jobs:
            job.resume_from = saved.get(job.name, job.resume_from)
            self._finishing.ended(job.name)
            self._roster.queue(job)
            yield _paused(job, PauseReason.MOVED)
        seconds = self._change_worker()
        self._redeployment.restart_seconds = seconds
        replicas = ", ".join(f"⟨{each.tp},{each.pp}⟩" for each in self._replicas)
        took = f"the change took {seconds:.1f} s"
        yield Notice(f"{self._processes} processes train from now on, as replicas {replicas}; {took}")

    def _change_worker(self) -> float:
        """Replace the worker; return the seconds that this took."""
        assert self._renew is not None
        began = self._clock()
        self._packer.close()
        self._use(self._renew())
        return self._clock() - began

    def _detach(self, job: str) -> None:
        """Take a job from the worker; a lost worker no longer has it."""
        try:
            self._send(Detach(job))
        except LostProcessError as error:
            self._lost = self._lost or error

    # ---- joining and leaving --------------------------------------------------------------------------

    @property
    def _live(self) -> dict[str, LiveJob]:
        return self._roster.live

    def _admit(self) -> Iterator[Event]:
        """Fill the free slots; a job of higher priority preempts one of lower. Where that pays, or one needs
        it, the deployment changes first."""
        if self._lost is not None:
            return
        started, preempted = self._roster.choose() if self._roster.waiting else ([], [])
        staying = [job for job in self._live.values() if job not in preempted]
        if self._redeployment.change([*staying, *started]):
            yield from self._move()
            if self._live:
                return  # the disk refuses: a job that starts may be too long for the replicas as they are
            started, preempted = self._roster.choose()
        if any(job.in_flight for job in preempted):
            yield from self._land()
            started, preempted = self._roster.choose()  # a job may have ended
        for job in preempted:
            yield from self._pause(job, PauseReason.PREEMPTED, self._roster.queue)
        if any(job.name in self._live for job in preempted):
            return  # one could not be saved and keeps its slot
        for job in started:
            yield from self._attach(job)
            if job in self._roster.waiting:
                return  # turned away: there is no room for more

    def _attach(self, job: LiveJob) -> list[Event]:
        self._roster.start(job)
        outcome = self._send(Attach(job.spec, job.resume_from, job.warm_from))
        if outcome.out_of_memory is not None:
            return self._turn_away(job, outcome.out_of_memory)
        if job.name in outcome.attached:
            return self._attached(job, outcome.attached[job.name])
        job.attaching = job.name not in outcome.failures  # behind what is in flight
        return self._end_failed(outcome.failures)

    def _attached(self, job: LiveJob, attached: Attached) -> list[Event]:
        job.resume_at(attached.cursor)
        self._ledger.charge(job, attached.seconds)
        self.checkpointer.admitted(job, attached.checkpoint)
        if job.name not in self._joined:
            self._joined.append(job.name)
        notices = [Notice(f"{job.name}: {text}") for text in attached.notices]
        return [*notices, JobAdmitted(job.spec, job.step, job.order.steps, GROUP, job.cursor)]

    def _turn_away(self, job: LiveJob, detail: str) -> list[Event]:
        """Handle a job whose attaching ran out of memory: it waits until fewer train; if none trains, it
        fails."""
        alone = len(self._live) == 1
        if not alone:
            self._roster.shrink()
        self._roster.queue(job)
        if alone:
            reason = f"out of memory while it was attached, with no other job training: {detail}"
            return [self._end(job, JobState.FAILED, reason)]
        return [Notice(f"{job.name} waits for memory: out of memory while it was attached ({detail})")]

    def _pause(
        self, job: LiveJob, reason: PauseReason, move: Callable[[LiveJob], None], *, urgent: bool = False
    ) -> list[Event]:
        """Save a live job, detach it from the worker and ``move`` it; if it cannot be saved, it stays."""
        if job.name not in self._live:
            move(job)
            return [_paused(job, reason)]
        saved, notices = self.checkpointer.save([job], urgent=urgent)
        checkpoint = saved.get(job.name)
        if _older(job, checkpoint):
            return [*notices]  # it would lose steps
        job.resume_from = checkpoint
        self._detach(job.name)
        move(job)
        return [*notices, _paused(job, reason)]

    def _end_failed(self, failures: Mapping[str, str]) -> list[Event]:
        """End these jobs; one that is in flight ends when it is not."""
        events: list[Event] = []
        for name, reason in failures.items():
            job = self._live[name]
            job.cancelled = job.cancelled or (JobState.FAILED, reason)
            if not job.in_flight:
                events.append(self._end(job, *job.cancelled))
        return events

    def _interrupt(self) -> list[Event]:
        before = self._outlive(self._land())
        jobs = self._roster.all()
        ends = [self._end(job, *job.cancelled) for job in jobs if job.cancelled is not None]
        jobs = [job for job in jobs if job.cancelled is None]
        try:
            saved, notices = self.checkpointer.save(jobs)
        except LostProcessError:
            self._fall_back()
            saved, notices = self.checkpointer.save(jobs)
        ends += [self._end(job, JobState.PAUSED, INTERRUPTED, checkpoint=saved.get(job.name)) for job in jobs]
        return [*before, *notices, *ends]

    def _end(
        self,
        job: LiveJob,
        state: JobState,
        reason: str,
        *,
        adapter: Path | None = None,
        checkpoint: Path | None = None,
    ) -> Event:
        if job.name in self._live:
            self._detach(job.name)
        self._roster.end(job)
        self.checkpointer.ended(job.name)
        self._finishing.ended(job.name)
        return job.ended(state, reason, self._clock(), adapter=adapter, checkpoint=checkpoint)

    # ---- one iteration --------------------------------------------------------------------------------

    def _send(self, command: Command) -> Outcome:
        return self._ledger.send(command, self._live)

    def _train(self) -> Iterator[Event]:
        """Run one global batch of every live job through the model, then take each job's step."""
        if self._flights is not None:
            yield from self._fly(self._flights.next(self._live.values(), self._clock()))
            return
        started = self._clock()
        while jobs := {name: job for name, job in self._live.items() if job.trains}:
            microbatches = self._packer.pack([job.next_batch() for job in jobs.values()])
            expected = self._predictions.expect(microbatches, self._live)
            order = by_completion(jobs, microbatches)
            steps = [jobs[name].next_step() for name in order]
            later = (job.later_batch() for job in jobs.values())
            self._packer.prepare(batch for batch in later if batch is not None)
            run = self._send(RunSchedule((*microbatches, *steps), self._settings.engine.schedule))
            if run.out_of_memory is None:
                yield from self._stepped(jobs, run, started, expected)
                return
            yield from self._make_room(list(jobs.values()), run.out_of_memory)

    def _fly(self, command: RunSchedule | None) -> Iterator[Event]:
        """Send a pipeline the next window; what is complete by now."""
        run = self._send(command) if command is not None else Outcome()
        for name in (*run.attached, *run.failures):
            self._live[name].attaching = False
        for name, attached in run.attached.items():
            yield from self._attached(self._live[name], attached)
        yield from self._end_failed(run.failures)
        began, now, share = self._ended, self._clock(), 0.0
        for outcome in run.schedules:
            assert self._flights is not None
            flight = self._flights.landed()
            share = share or (now - max(began, flight.sent)) / len(run.schedules)  # of the time, an even one
            yield from self._stepped(flight.jobs, outcome, self._clock() - share, flight.expected)

    def _land(self) -> Iterator[Event]:
        """Wait for all that is in flight, and evaluate what is due: afterwards jobs may leave."""
        if self._flights is not None:
            yield from self._fly(self._flights.next((), self._clock()))
            yield from self._evaluate()

    def _make_room(self, jobs: Sequence[LiveJob], detail: str) -> list[Event]:
        """Handle a step that ran out of memory: the job with the lowest standing leaves, the others repeat
        the step."""
        last = max(jobs, key=lambda job: job.standing)
        if len(jobs) > 1:
            self._roster.shrink()
            events = self._pause(last, PauseReason.PREEMPTED, self._roster.queue, urgent=True)
            if last.name not in self._live:
                return events
            reason = f"out of memory, and its checkpoint could not be saved: {detail}"
            return [*events, self._end(last, JobState.FAILED, reason)]
        return [self._end(last, JobState.FAILED, f"out of memory, with no other job training: {detail}")]

    def _stepped(
        self, jobs: dict[str, LiveJob], run: Outcome, started: float, expected: Expected
    ) -> list[Event]:
        """What came of a group's schedule."""
        ended = self._ended = self._clock()
        seconds = ended - started
        self._redeployment.took(seconds)
        events = self._end_failed(run.failures)
        for name, job in jobs.items():
            if name in run.steps:
                events.append(progress(job, run.tallies[name], run.steps[name].grad_norm, seconds))
        number = next(self._iterations)
        spans = on_one_clock(self._worker.take_spans())
        times = expected.with_predictions(times_between(spans, started, ended), run)
        step = group_step(GROUP, number, tuple(jobs), run, expected, seconds, self._packer.capacity, times)
        fitted = self._predictions.learn(expected, run, seconds, number, times, jobs | self._live)
        return [*events, step, *traced(spans), *fitted]

    def _evaluate(self) -> list[Event]:
        """Validation losses of all jobs that are due; where wanted, accuracies of those that continue, or
        whose last weights may be the most accurate."""
        due = [job for job in self._live.values() if job.evaluation_due and not job.in_flight]
        measured, failed = evaluate(due, self._send, self._packer)
        asked = [job for job in due if job.name not in failed and (not job.done or job.keeps_most_accurate)]
        found, unanswered = answered(asked, self._send, self._data, at_end=False)
        going = [each for each in found if not self._live[each.job].done]  # what others keep follows
        return [*measured, *going, *self._end_failed(failed | unanswered)]

    def _finish(self) -> list[Event]:
        """End every job whose budget is spent."""
        events, finished = self._finishing.finish([job for job in self._live.values() if job.done])
        ends = [
            self._end(each.job, JobState.FINISHED, each.reason, adapter=each.adapter) for each in finished
        ]
        return [*events, *ends]


def _older(job: LiveJob, checkpoint: Path | None) -> bool:
    """Whether a checkpoint lacks the last steps of a job."""
    return job.step > 0 and (checkpoint is None or checkpoint.name != checkpoint_name(job.step))


def _paused(job: LiveJob, reason: PauseReason) -> JobPaused:
    return JobPaused(job.name, job.step, reason, job.cursor.tokens, job.cursor.device_seconds)

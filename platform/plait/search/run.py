"""The search loop: it fills slots with trials, passes events on, and reports results to tracking and study.

The search and the packing are one loop: a slot that becomes free is filled at the next iteration of the
running group. Trials that wait at a rung leave their slots to new ones, and resume before more are suggested.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from plait.core.errors import InputError, ProcessError, StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import (
    Event,
    JobAdmitted,
    JobEvaluated,
    JobGenerated,
    JobPaused,
    JobReleased,
    Notice,
)
from plait.core.settings import SearchSettings
from plait.engine.iteration import SPENT
from plait.search.objective import Observed, rejection
from plait.search.orders import ENDING, ORDERED, Orders
from plait.search.results import SearchEnd, failure_limit
from plait.search.stopper import Stopper
from plait.search.study import StudyTrials
from plait.search.trials import Trial
from plait.tracking.names import EVAL_ACCURACY

WAIT_SECONDS = 0.2  # interval of checks while no trial runs
LOOK_SECONDS = 1.0  # interval of checks of what other workers suggested, decided at a rung or adopted
BY_USER = "by the user"
ADOPTED = "another worker could not reach this one and adopted the trial"


class Engine(Protocol):
    """What the loop needs from the engine's coordinator."""

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
        """Queue a job (fresh, with given weights or from a checkpoint), which waits at each of its rungs;
        ``recorded``: device seconds that earlier processes recorded for it."""

    def cancel(self, job: str, reason: str, *, state: JobState = JobState.STOPPED) -> None:
        """End a job in this state at the next boundary."""

    def pause(self, job: str) -> None:
        """Save a job at the next boundary and free its slot."""

    def resume(self, job: str, reason: PauseReason = PauseReason.BY_USER) -> None:
        """Resume a job that is paused for this reason."""

    def settle(self) -> Iterable[Event]:
        """Run the boundary between two iterations: end what was cancelled, pause what waits."""

    def stop(self) -> None:
        """At the next ``advance``, save every job and end it as paused."""

    def free_slots(self) -> int:
        """How many more jobs could be admitted now."""

    def advance(self) -> Iterable[Event]:
        """Run one iteration of the group."""


class Recorder(Protocol):
    """Records what happens; implemented by the tracker."""

    def start_job(self, job: JobSpec, trial: int, outside: str = "") -> float:
        """Note that a job is about to be submitted; ``outside``: its settings outside the search space.
        Returns the device seconds that earlier processes recorded for it."""

    def handle(self, event: Event) -> None:
        """Record an event of the engine or, for the end of a job, what the search decided."""

    def lose(self, job: str) -> None:
        """Stop recording a job, because another process trains it from now on."""

    def commit(self) -> None:
        """Wait until everything recorded so far would survive a crash."""


class View(Protocol):
    """Shows a search while it trains; called after the recorder, whose leaderboard it draws."""

    def __enter__(self) -> Self:
        """Begin to show it."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any, /) -> None:
        """Show its end."""

    def refresh(self) -> None:
        """Redraw if due, because there are no events while no job trains."""

    def handle(self, event: Event) -> None:
        """Show what an event changed."""

    def lose(self, job: str) -> None:
        """Show that another process trains the job from now on."""


@dataclass(slots=True, eq=False)
class RunningTrial:
    """A trial from its submission to its end, and the reasons why it does not train.

    Attributes:
        state: RUNNING while it has a slot of the search, even if the engine preempted it; else PAUSED.
        at_rung: it left its slot at a rung, so the end of a pause does not bring it back.
        released: its rung is decided in its favour; it waits for a slot.
        by_order: the user ordered the pause.
        adopted: another worker trains it now, so its end here is not reported to the study.
    """

    trial: Trial
    priority: int
    state: JobState = JobState.RUNNING
    at_rung: bool = False
    released: bool = False
    by_order: bool = False
    adopted: bool = False

    @property
    def holds_slot(self) -> bool:
        """Whether it counts towards ``search.parallel``."""
        return self.state == JobState.RUNNING

    def leave_slot(self, reason: PauseReason) -> None:
        """Note that the engine paused it."""
        # The engine resumes these without the search, in the same slot.
        if reason not in (PauseReason.PREEMPTED, PauseReason.LOST, PauseReason.MOVED):
            self.state = JobState.PAUSED
            self.at_rung = self.at_rung or reason == PauseReason.AT_RUNG

    def take_slot(self) -> None:
        """Note that it trains again, past the rung at which it waited."""
        self.state, self.at_rung, self.released = JobState.RUNNING, False, False

    def end_pause(self) -> None:
        """End the user's pause: it gets its slot back, unless it waits at a rung."""
        self.by_order = False
        if not self.at_rung:
            self.state = JobState.RUNNING


class SearchLoop:
    """Runs a search to its end.

    Args:
        make_job: makes the job of a trial; an InputError fails only that trial, unless it is a StorageError.
        stop: called after every iteration; True ends the search in order.
        stopper: ends trials early; None lets all of them finish.
        read_orders: returns the user's orders; called before every iteration.
        view: shows what happens; None shows nothing.
        lift: the command that ends a pause, for messages.
        say_dead: says which workers are dead, before a trial of theirs begins here.
    """

    def __init__(
        self,
        source: StudyTrials,
        make_job: Callable[[Trial], JobSpec],
        coordinator: Engine,
        recorder: Recorder,
        settings: SearchSettings,
        stop: Callable[[], bool] = lambda: False,
        stopper: Stopper | None = None,
        read_orders: Callable[[], Orders] = Orders,
        view: View | None = None,
        lift: str = "plait control NAME resume",
        say_dead: Callable[[], None] = lambda: None,
    ) -> None:
        self._lift = lift
        self._say_dead = say_dead
        self._source = source
        self._make_job = make_job
        self._coordinator = coordinator
        self._recorder = recorder
        self._settings = settings
        self._stop = stop
        self._stopper = stopper
        self._read_orders = read_orders
        self._view = view
        self._trials: dict[str, RunningTrial] = {}  # by name of the job
        self._orders = Orders()
        self._observed = Observed()
        self._next_look = -math.inf
        self._none_left = False  # no trial was suggested the last time
        self._nothing_for: tuple[int, bool] | None = None  # the last request that returned no trial
        self._limit: tuple[int, str] | None = None  # the revision at which it was computed, and the message
        self._reported_end = False  # the stopper knows that no more trials will come
        self._waited = False

    def run(self) -> SearchEnd:
        """Train until every trial has ended, or ``stop`` returns True."""
        while not self._stop():
            self._obey()
            look = self._look_due()
            if look or not self._in_slots:  # a search must not end by outdated information
                self._nothing_for = self._limit = None
            if look:
                self._drop_adopted()
            self._decide(ask_again=look)
            self._fill()
            if look:
                self._preempt()
            if self._in_slots:
                self._advance()
                continue
            self._take(self._coordinator.settle())
            if self._orders.mode == "paused":
                time.sleep(WAIT_SECONDS)
            elif not self._wait():
                self._source.withdraw_orders()
                return self._result()
        self._interrupt()
        pause = self._orders.mode if self._orders.mode == "paused" else ""
        return SearchEnd(tuple(self._source.finished()), interrupted=True, ended_by=pause)

    @property
    def _in_slots(self) -> list[RunningTrial]:
        return [each for each in self._trials.values() if each.holds_slot]

    @property
    def _released(self) -> RunningTrial | None:
        """The first trial that was released from its rung and waits for a slot."""
        waiting = (each for each in self._trials.values() if each.released)
        return min(waiting, key=lambda each: (-each.priority, each.trial.number), default=None)

    @property
    def _begins_trials(self) -> bool:
        return self._orders.mode == "running" and not self._failure_limit

    @property
    def _failure_limit(self) -> str:
        """The message that too many trials failed; "" if they did not. Started trials are then ended, and no
        more are suggested. Kept while nothing changes here, because it reads all trials of the study in the
        training thread, which takes milliseconds, or tens of them over a network."""
        if self._settings.max_failure_rate >= 1:
            return ""
        revision = self._source.revision
        if self._limit is None or self._limit[0] != revision:
            message = failure_limit(self._source.failed, self._source.total, self._settings)
            self._limit = revision, message
        return self._limit[1]

    # ---- orders and other workers ------------------------------------------------------------------------

    def _obey(self) -> None:
        """Carry out the user's orders: end trials, pause all, resume them."""
        if self._view is not None:
            self._view.refresh()
        before, self._orders = self._orders, self._read_orders()
        if self._orders.ended:
            # The last worker with a trial withdrew the order as carried out, so this one ends, too.
            self._orders = replace(self._orders, mode=self._orders.was)
        mode = self._orders.mode
        if mode != before.mode and mode != "running":
            self._record(Notice(self._orders.describe(self._lift)))
        for name, each in self._trials.items():
            if mode == "cancelling" or each.trial.number in self._orders.stops:
                self._coordinator.cancel(name, BY_USER)
            if mode == "paused" and each.holds_slot and not each.by_order:
                each.by_order = True
                self._coordinator.pause(name)
            elif mode != "paused" and each.by_order:
                each.end_pause()
                self._coordinator.resume(name)

    def _look_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return True

    def _drop_adopted(self) -> None:
        """Cancel the jobs of trials that another worker adopted because this one seemed to be dead."""
        adopted = self._source.claims.adopted()
        for name, each in self._trials.items():
            if each.trial.number in adopted:
                each.adopted = True
                self._coordinator.cancel(name, ADOPTED)
                self._record(Notice(f"{name}: {ADOPTED}"))

    # ---- filling slots -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._none_left = False
        if self._orders.mode == "cancelling":
            self._end_orphaned()
        if self._orders.mode in ("paused", "cancelling"):
            return
        while len(self._in_slots) < self._settings.parallel and self._coordinator.free_slots() > 0:
            if (released := self._released) is not None:
                self._resume(released)
                continue
            question = self._source.revision, self._begins_trials
            new = None if question == self._nothing_for else self._ask(new=question[1])
            if new is None:
                self._none_left, self._nothing_for = True, question
                return
            self._start(new)

    def _preempt(self) -> None:
        """Start a trial that has a higher priority than a running one even without a free slot: the engine
        preempts the running one, and resumes it later."""
        while (taken := self._in_slots) and self._begins_trials:
            ranks = sorted((each.priority for each in taken), reverse=True)
            lowest = ranks[: self._settings.parallel][-1]
            released = self._released
            if released is not None and released.priority > lowest:
                self._resume(released)
            elif (new := self._ask(above=lowest)) is not None:
                self._start(new)
            else:
                return

    def _ask(self, *, new: bool = True, above: int | None = None) -> Trial | None:
        """The next trial; if its worker is dead, that has been said."""
        trial = self._source.ask(new=new, above=above)
        self._say_dead()
        return trial

    def _resume(self, released: RunningTrial) -> None:
        released.take_slot()
        self._coordinator.resume(released.trial.name, PauseReason.AT_RUNG)

    def _end_orphaned(self) -> None:
        """End the trials that dead workers left, without training them further."""
        while (trial := self._ask(new=False)) is not None:
            if self._announce(trial) is not None:
                self._end(trial, JobResult(trial.name, JobState.STOPPED, reason=BY_USER))

    def _announce(self, trial: Trial) -> tuple[JobSpec, float] | None:
        """Make and announce the job of a trial; also the device seconds recorded for it. None if the trial
        ended, because its job cannot be made or its settings break a constraint."""
        try:
            job = self._make_job(trial)
        except StorageError:
            raise
        except InputError as error:  # no record of this job exists yet
            self._source.tell(trial, JobResult(trial.name, JobState.FAILED, reason=str(error)))
            self._record(Notice(f"{trial.name} failed: {error.in_line}"))
            return None
        recorded = self._recorder.start_job(job, trial.number, trial.outside)
        if (rejected := rejection(job, self._settings)) is not None:
            self._end(trial, rejected)
            return None
        return job, recorded

    def _start(self, trial: Trial) -> None:
        announced = self._announce(trial)
        if announced is None:
            return
        job, recorded = announced
        try:
            rungs = self._stopper.start(trial) if self._stopper is not None else ()
            measured = self._stopper is not None and self._stopper.measured
            self._coordinator.submit(
                job,
                resume_from=trial.resume_from,
                warm_from=trial.warm_from,
                rungs=rungs,
                measured=measured,
                recorded=recorded,
            )
        except (StorageError, ProcessError):  # no fault of the trial
            raise
        except InputError as error:
            self._end(trial, JobResult(trial.name, JobState.FAILED, reason=str(error)))
        else:
            self._trials[job.name] = RunningTrial(trial, job.train.priority)

    # ---- rungs -------------------------------------------------------------------------------------------

    def _decide(self, *, ask_again: bool = False) -> bool:
        """Resume or end the trials whose rungs are decided, and repeat while an end allows further
        decisions."""
        if self._stopper is None:
            return False
        decided = False
        while True:
            ends = self._none_left or bool(self._failure_limit)
            ends = ends or self._orders.mode in ENDING
            ask_again, self._reported_end = ask_again or ends != self._reported_end, ends
            decisions = self._stopper.decisions(self._expected, ask_again=ask_again)
            for trial, decision in decisions:
                if decision.action != "continue":
                    state = JobState.FAILED if decision.action == "fail" else JobState.PRUNED
                    self._coordinator.cancel(trial.name, decision.reason, state=state)
                elif self._trials[trial.name].holds_slot:
                    self._coordinator.resume(trial.name, PauseReason.AT_RUNG)
                else:
                    self._trials[trial.name].released = True
                    self._record(JobReleased(trial.name))
            self._take(self._coordinator.settle())
            decided = decided or bool(decisions)
            if all(decision.action == "continue" for _, decision in decisions):
                return decided

    def _expected(self) -> int | None:
        """How many trials there will be; None: only those already suggested. During a pause, cohorts wait."""
        return None if self._reported_end else self._source.total

    def _wait(self) -> bool:
        """Wait while no trial runs and none can begin; False if no more can come."""
        if not self._trials:
            others = self._source.claims.wait()
            if others and not self._waited:
                self._record(Notice("all trials are taken; waiting for other workers"))
            self._waited = others
            return others
        if not self._decide(ask_again=True) and not self._source.claims.wait():
            time.sleep(WAIT_SECONDS)  # all are paused
        return True

    # ---- events ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        events = list(self._coordinator.advance())
        self._take(events)
        if all(isinstance(event, Notice) for event in events):
            time.sleep(WAIT_SECONDS)  # all are held up by a pause or a full disk

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._observed.handle(event)
            if not isinstance(event, JobResult):
                self._record(event)
            if self._stopper is not None:
                self._stopper.handle(event, self._observed)
            match event:
                case JobEvaluated() | JobGenerated():
                    self._report(event)
                case JobAdmitted() if event.job.name in self._trials:
                    self._source.resume(self._trials[event.job.name].trial)
                case JobPaused() if event.job in self._trials:
                    running = self._trials[event.job]
                    running.leave_slot(event.reason)
                    self._source.pause(running.trial)
                case JobResult():
                    self._ended(event)

    def _record(self, event: Event) -> None:
        self._recorder.handle(event)
        if self._view is not None:
            self._view.handle(event)

    def _report(self, event: JobEvaluated | JobGenerated) -> None:
        """Store intermediate objectives at evaluations only, because a database takes tens of milliseconds
        for each; accuracies when they are known."""
        running = self._trials.get(event.job)
        metric = self._settings.objectives[0].metric
        if (metric == EVAL_ACCURACY) != isinstance(event, JobGenerated):
            return
        value = self._observed.value(event.job, metric)
        if running is not None and value is not None and math.isfinite(value):
            at = event.step if self._stopper is None else self._stopper.stored_at(event.job, event.step)
            self._source.report(running.trial, at, value)

    def _ended(self, result: JobResult) -> None:
        running = self._trials.pop(result.job)
        if running.adopted:
            self._recorder.lose(result.job)
            if self._view is not None:
                self._view.lose(result.job)
        elif result.state == JobState.PAUSED:
            self._record(result)
            self._source.pause(running.trial, result.checkpoint)
        else:
            self._end(running.trial, self._scored(result))

    def _scored(self, result: JobResult) -> JobResult:
        """The result with the objectives. A completed job is finished only if every objective and constraint
        was measured; one stopped before has the last value of the first objective."""
        if result.state == JobState.FAILED:
            return replace(result, reason=result.reason or JobState.FAILED)
        if result.state != JobState.FINISHED:
            value = self._observed.value(result.job, self._settings.objectives[0].metric)
            return result if value is None else replace(result, values=(value,))
        score = self._observed.score(result.job, self._settings)
        if score.missing:
            reason = score.missing if result.reason == SPENT else f"{score.missing}: {result.reason}"
            return replace(result, state=JobState.FAILED, reason=reason)
        broken = [text for text, amount in score.violations.items() if amount > 0]
        reason = f"violates {', '.join(broken)}" if broken else result.reason
        return replace(result, reason=reason, values=score.values, violations=score.violations)

    def _end(self, trial: Trial, result: JobResult) -> None:
        """Record the end first in tracking, on the disk, then in the study: a trial that has ended in the
        study is never trained again, so its records must be complete by then."""
        self._record(replace(result, trial=trial.number, parameters=trial.values))
        self._recorder.commit()
        self._source.tell(trial, result)

    # ---- the end -----------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Let the engine save and pause every job; trials that do not answer are orphaned."""
        with suppress(StorageError):  # the study cannot be read while its storage is unavailable
            self._drop_adopted()
        self._coordinator.stop()
        while active := len(self._trials):
            self._take(self._coordinator.advance())
            if len(self._trials) == active:
                return

    def _result(self) -> SearchEnd:
        """The result when all trials have ended, or no more begin because of an order or failures."""
        finished = tuple(self._source.finished())
        left = self._source.over < self._source.total
        if self._orders.mode != "running":  # where nothing is left, there is nothing to resume
            mode, early = self._orders.mode, left
            early = early or (mode == "cancelling" and any(each.reason == BY_USER for each in finished))
            return SearchEnd(finished, ended_by=mode if left else "", why=ORDERED if early else "")
        why = self._failure_limit
        if why and left:
            return SearchEnd(finished, ended_by="failing", why=why)
        end = SearchEnd(finished)
        return replace(end, why=end.rejected_to_the_end)


# Closing a terminal sends SIGHUP more than once; repeated ones are ignored.
SECOND: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_IGN,
}


class Interrupts:
    """Within this context, note the first of these signals and leave the second to Python (KeyboardInterrupt)
    or to the system.

    Outside the main thread, where signals cannot be caught, it does nothing. SIGTERM and SIGHUP stay ignored
    if they were (nohup).

    Args:
        announce: called once, at the first signal, in the signal handler: unbuffered output only.
        signals: the signals to note.
    """

    def __init__(
        self, announce: Callable[[], None], signals: Collection[signal.Signals] = tuple(SECOND)
    ) -> None:
        self._announce = announce
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                before = signal.getsignal(number)
                if number == signal.SIGINT or before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _first(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        for number in self._before:
            signal.signal(number, SECOND[number])
        self._announce()

"""The search loop: places are filled from the trial source, events go round, ends are told.

The search and the packing are one loop: a place that falls free is filled at the next
iteration of the running group, whatever the others do. Trials that wait at a rung leave their places to new
ones, and come back before further ones are drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from plait.core.errors import InputError, StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import Event, JobEvaluated, JobPaused, Notice
from plait.core.settings import SearchSettings
from plait.engine.iteration import SPENT
from plait.search.control.orders import Orders
from plait.search.objective import Observed
from plait.search.outlook import Outlook
from plait.search.partners import Coordinator, Recorder
from plait.search.results import SearchResult
from plait.search.stopper import Stopper
from plait.search.trials import Trial, TrialSource

PREEMPTED = PauseReason.PREEMPTED  # its trial keeps its slot in the search, and the engine resumes it
WAIT_SECONDS = 0.2  # between two looks, where nobody trains
LOOK_SECONDS = 1.0  # between two looks at what others did: drew, decided at a rung, or let a trial come first
ENDING = ("stopping", "cancelling")  # orders after which no further trial is drawn
ORDERED = "as `plait control` asked for"
BY_USER = "by the user"
ADOPTED = "another worker, which could not reach this one, adopted it"


@dataclass(slots=True)
class SearchRun:
    """Runs a search to its end.

    Attributes:
        source: draws the trials.
        make_job: the job of a trial; an InputError fails that trial only, unless it is a StorageError.
        stop: asked after every iteration; True ends the search in order.
        stopper: ends trials early; None lets all come to their ends.
        owner: the orders of the search's owner, asked for before every iteration.
    """

    source: TrialSource
    make_job: Callable[[Trial], JobSpec]
    coordinator: Coordinator
    recorder: Recorder
    settings: SearchSettings
    stop: Callable[[], bool] = lambda: False
    stopper: Stopper | None = None
    owner: Callable[[], Orders] = Orders
    _orders: Orders = field(default_factory=Orders)
    _paused: set[str] = field(default_factory=set)
    _at_rung: set[str] = field(default_factory=set)  # parked there, so not to come back by the end of a pause
    _live: dict[str, Trial] = field(default_factory=dict)
    _parked: dict[str, Trial] = field(default_factory=dict)
    _returning: list[Trial] = field(default_factory=list)  # parked, and let past their rungs
    _lost: set[str] = field(default_factory=set)  # another process trains them now
    _priority: dict[str, int] = field(default_factory=dict)
    _next_look: float = -math.inf
    _outlook: Outlook = field(init=False)
    _drawn_out: bool = False
    _ends: bool = False  # as the stopper was told last: none will be drawn any more
    _observed: Observed = field(default_factory=Observed)
    _waited: bool = False
    _stopping: bool = False

    def run(self) -> SearchResult:
        """Go on until every trial is over, or ``stop`` says so."""
        self._outlook = Outlook(self.source, self.settings)
        while not self.stop():
            self._obey()
            look = self._look()
            if look or not self._live:  # no search ends by what was true a while ago
                self._outlook.forget()
            if look:
                self._give_up()
            self._judge(ask_again=look)
            self._fill()
            if look:
                self._let_in()
            if self._live:
                self._advance()
                continue
            self._take(self.coordinator.settle())
            if self._orders.mode == "paused":
                time.sleep(WAIT_SECONDS)
            elif not self._wait():
                return self._result()
        self._wind_up()
        return SearchResult(tuple(self.source.finished()), interrupted=True)

    def _obey(self) -> None:
        """Do what the owner ordered: end trials, park all, let them go on."""
        before, self._orders = self._orders, self.owner()
        if self._orders.ended:
            # Another worker, the last one with a trial, withdrew the order as carried out: this one ends too.
            self._orders = replace(self._orders, mode=self._orders.was)
        mode = self._orders.mode
        if mode != before.mode and mode != "running":
            self.recorder.handle(Notice(f"{mode}, {ORDERED}"))
        for name, trial in [*self._live.items(), *self._parked.items()]:
            if mode == "cancelling" or trial.number in self._orders.stops:
                self.coordinator.cancel(name, BY_USER)
        if mode == "paused":
            for name in self._live.keys() - self._paused:
                self.coordinator.pause(name)
                self._paused.add(name)
        elif self._paused:
            self._unpause()

    def _unpause(self) -> None:
        """Those that trained when the pause began keep their places before all others."""
        for name in self._paused & (self._live.keys() | self._parked.keys()):
            self.coordinator.resume(name)
            if name not in self._at_rung and name in self._parked:
                self._live[name] = self._parked.pop(name)
        self._paused.clear()

    def _result(self) -> SearchResult:
        """Nothing more is to come: all that there were to be, or no more by order or after failures."""
        finished = tuple(self.source.finished())
        if self._orders.mode != "running":
            return SearchResult(finished, ended_by=self._orders.mode, why=ORDERED)
        if self._outlook.hopeless and self.source.over < self.source.total:
            return SearchResult(finished, ended_by="failing", why=self._outlook.gave_up)
        return SearchResult(finished)

    def _fill(self) -> None:
        self._drawn_out = False
        if self._orders.mode == "cancelling":
            self._end_left_over()
        if self._orders.mode in ("paused", "cancelling"):
            return
        while len(self._live) < self.settings.parallel and self.coordinator.free_slots() > 0:
            if self._returning:
                self._come_back(self._first_returning)
                continue
            new = self._outlook.draw(new=self._draws)
            if new is None:
                self._drawn_out = True
                return
            self._start(new)

    @property
    def _draws(self) -> bool:
        """Whether further trials may begin."""
        return self._orders.mode == "running" and not self._outlook.hopeless

    def _look(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return True

    def _give_up(self) -> None:
        """What others took over, since this process seemed to be dead, is theirs."""
        lost = self.source.lost()
        for name, trial in [*self._live.items(), *self._parked.items()]:
            if trial.number in lost:
                self._lost.add(name)
                self.coordinator.cancel(name, ADOPTED)
                self.recorder.handle(Notice(f"{name}: {ADOPTED}"))

    def _let_in(self) -> None:
        """Who has a higher priority than one of those that train waits for no place: the engine parks that
        one, which comes back by itself."""
        while self._live and self._draws:
            ranks = sorted((self._priority[name] for name in self._live), reverse=True)
            lowest = ranks[: self.settings.parallel][-1]
            if self._returning and self._priority[self._first_returning.name] > lowest:
                self._come_back(self._first_returning)
            elif (new := self.source.ask(above=lowest)) is not None:
                self._start(new)
            else:
                return

    @property
    def _first_returning(self) -> Trial:
        return min(self._returning, key=lambda each: (-self._priority[each.name], each.number))

    def _come_back(self, trial: Trial) -> None:
        self._returning.remove(trial)
        self._live[trial.name] = self._parked.pop(trial.name)
        self._at_rung.discard(trial.name)
        self.coordinator.resume(trial.name, PauseReason.AT_RUNG)

    def _wait(self) -> bool:
        """Nobody trains, and nobody can be drawn: False when nothing more can come."""
        if not self._parked:
            others = self.source.wait()
            if others and not self._waited:
                self.recorder.handle(Notice("no trial is free: waiting for those that other processes train"))
            self._waited = others
            return others
        if not self._judge(ask_again=True) and not self.source.wait():
            time.sleep(WAIT_SECONDS)  # all are paused
        return True

    def _judge(self, *, ask_again: bool = False) -> bool:
        """Let go on or end those whose rungs are decided, as long as one end brings further decisions."""
        if self.stopper is None:
            return False
        decided = False
        while True:
            ends = self._drawn_out or self._outlook.hopeless or self._orders.mode in ENDING
            ask_again, self._ends = ask_again or ends != self._ends, ends
            decisions = self.stopper.decisions(self._expected, ask_again=ask_again)
            for trial, decision in decisions:
                if decision.action != "continue":
                    state = JobState.FAILED if decision.action == "fail" else JobState.PRUNED
                    self.coordinator.cancel(trial.name, decision.reason, state=state)
                elif trial.name in self._live:
                    self.coordinator.resume(trial.name, PauseReason.AT_RUNG)
                else:
                    self._returning.append(trial)
            self._take(self.coordinator.settle())
            decided = decided or bool(decisions)
            if all(decision.action == "continue" for _, decision in decisions):
                return decided

    def _expected(self) -> int | None:
        """How many trials there will be; None: those that were drawn. A pause keeps cohorts waiting."""
        return None if self._ends else self.source.total

    def _end_left_over(self) -> None:
        """End what processes that are gone left behind, as it is."""
        while (trial := self.source.ask(new=False)) is not None:
            if self._announce(trial) is not None:
                self._end(trial, JobResult(trial.name, JobState.STOPPED, reason=BY_USER))

    def _announce(self, trial: Trial) -> JobSpec | None:
        """The job of a trial, made known; None where it cannot be made, and the trial has failed."""
        try:
            job = self.make_job(trial)
        except StorageError:
            raise
        except InputError as error:  # nobody has heard of this job yet
            self.source.tell(trial, JobResult(trial.name, JobState.FAILED, reason=str(error)))
            return None
        self.recorder.start_job(job, trial.number)
        return job

    def _start(self, trial: Trial) -> None:
        job = self._announce(trial)
        if job is None:
            return
        try:
            rungs = self.stopper.start(trial) if self.stopper is not None else ()
            measured = self.stopper is not None and self.stopper.measured
            self.coordinator.submit(
                job,
                resume_from=trial.resume_from,
                warm_from=trial.warm_from,
                rungs=rungs,
                measured=measured,
            )
        except StorageError:
            raise
        except InputError as error:
            self._end(trial, JobResult(trial.name, JobState.FAILED, reason=str(error)))
        else:
            self._live[job.name] = trial
            self._priority[job.name] = job.train.priority

    def _advance(self) -> None:
        events = list(self.coordinator.advance())
        self._take(events)
        if all(isinstance(event, Notice) for event in events):
            time.sleep(WAIT_SECONDS)  # all are held: by a pause, or since the disk has no room for states

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._observed.handle(event)
            if not isinstance(event, JobResult):
                self.recorder.handle(event)
            if isinstance(event, JobEvaluated):
                self._report(event)
            if self.stopper is not None:
                self.stopper.handle(event, self._observed)
            if isinstance(event, JobResult):
                self._ended(event)
            elif isinstance(event, JobPaused) and event.reason != PREEMPTED and event.job in self._live:
                self._parked[event.job] = self._live.pop(event.job)
                self._at_rung |= {event.job} if event.reason == PauseReason.AT_RUNG else set()

    def _report(self, event: JobEvaluated) -> None:
        """Keep intermediate objectives at evaluations only: a database takes tens of milliseconds for one."""
        trial = self._live.get(event.job)
        value = self._observed.value(event.job, self.settings.objectives[0].metric)
        if trial is not None and value is not None and math.isfinite(value):
            self.source.report(trial, event.step, value)

    def _ended(self, result: JobResult) -> None:
        trial = self._live.pop(result.job, None) or self._parked.pop(result.job)
        self._returning = [each for each in self._returning if each is not trial]
        if result.job in self._lost:
            self._lost.discard(result.job)
            self.recorder.lose(result.job)
        elif result.state == JobState.PAUSED:
            self.recorder.handle(result)
            self.source.put_back(trial, result.checkpoint)
        else:
            self._end(trial, self._scored(result))

    def _scored(self, result: JobResult) -> JobResult:
        """With the objectives. A job that came to its end is finished where every objective and constraint
        was measured; one that was stopped before has the first objective as it stood."""
        if result.state == JobState.FAILED:
            return replace(result, reason=result.reason or JobState.FAILED)
        if result.state != JobState.FINISHED:
            value = self._observed.value(result.job, self.settings.objectives[0].metric)
            return result if value is None else replace(result, values=(value,))
        score = self._observed.score(result.job, self.settings)
        if score.missing:
            reason = score.missing if result.reason == SPENT else f"{score.missing}: {result.reason}"
            return replace(result, state=JobState.FAILED, reason=reason)
        broken = [text for text, amount in score.violations.items() if amount > 0]
        reason = f"does not keep {', '.join(broken)}" if broken else result.reason
        return replace(result, reason=reason, values=score.values, violations=score.violations)

    def _end(self, trial: Trial, result: JobResult) -> None:
        """Tracking first, and on the disk, then the study: what the study knows to have ended is not trained
        again, so nothing of it may be missing by then."""
        self.recorder.handle(replace(result, trial=trial.number, parameters=trial.values))
        self.recorder.commit()
        self.source.tell(trial, replace(result, run_id=self.recorder.run_id(trial.name)))

    def _wind_up(self) -> None:
        """Let the engine save and end every job; trials that do not answer stay RUNNING for the next run."""
        self._stopping = True
        self.coordinator.stop()
        while active := len(self._live) + len(self._parked):
            self._take(self.coordinator.advance())
            if len(self._live) + len(self._parked) == active:
                return

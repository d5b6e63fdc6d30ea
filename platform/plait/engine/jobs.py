"""What the coordinator knows about its jobs: the progress of each, and which have a slot.

Plain mutable data, without tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import NANOSECONDS, Cursor, StepJob
from plait.core.plans import GlobalBatch
from plait.core.samples import TokenisedData
from plait.engine.admission import Admission, Demand
from plait.engine.steps import DataOrder, learning_rate, training_batch, validation_batch

Job = TypeVar("Job")


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job from its submission to its end.

    Attributes:
        arrival: its number in the order of submissions.
        submitted: time of submission, on the coordinator's clock.
        earlier: seconds from submission to the last checkpoint in earlier processes.
        eval_loss: of the last evaluation.
        cancelled: the state in which it is to end, and why; None while it may train.
        rungs: steps after which it waits until it is released.
        measured: whether the validation loss is wanted at every rung.
        reached: the last rung at which it waited.
        passed: the last rung that it passed.
        holds: why it may not train now; empty while it may.
        evaluated: step of the last evaluation.
        warm_from: folder of the weights that it starts with; None for fresh ones.
        started: whether this process has trained it.
        flying: steps that were sent to a pipeline and are not done.
        attaching: whether its attaching was sent to a pipeline and is not done.
        recorded: device seconds that earlier processes recorded; if one was killed, also after its last
            checkpoint.
    """

    spec: JobSpec
    data: TokenisedData
    order: DataOrder
    demand: Demand
    arrival: int
    submitted: float
    earlier: float = field(default=0.0, kw_only=True)
    resume_from: Path | None = None
    cursor: Cursor = field(default_factory=Cursor)
    eval_loss: float | None = None
    cancelled: tuple[JobState, str] | None = None
    rungs: frozenset[int] = frozenset()
    measured: bool = False
    reached: int = 0
    passed: int = 0
    holds: set[PauseReason] = field(default_factory=set)
    evaluated: int | None = None
    warm_from: Path | None = None
    started: bool = False
    flying: int = 0
    attaching: bool = False
    recorded: float = 0.0

    @property
    def name(self) -> str:
        """The job's name."""
        return self.spec.name

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.cursor.step

    @property
    def done(self) -> bool:
        """Whether the budget is spent."""
        return self.step >= self.order.steps

    @property
    def evaluation_due(self) -> bool:
        """Whether the validation loss is due after the last step."""
        return self.evaluated != self.step and self._evaluated_at(self.step)

    def _evaluated_at(self, step: int) -> bool:
        if len(self.data.validation) == 0:
            return False
        every = self.spec.train.eval_every
        at_rung = self.measured and step in self.rungs
        return step >= self.order.steps or at_rung or (every > 0 and step > 0 and step % every == 0)

    @property
    def trains(self) -> bool:
        """Whether its next step may be taken."""
        return not self.done and not self.holds

    @property
    def in_flight(self) -> bool:
        """Whether a pipeline works on it, so that it cannot be saved, moved or ended now."""
        return self.flying > 0 or self.attaching

    @property
    def may_fly(self) -> bool:
        """Whether its next step may be sent to a pipeline: no decision is due after those in flight."""
        if not self.trains or self.attaching or self.cancelled is not None:
            return False
        at = self.step + self.flying
        return not self.flying or not (at >= self.order.steps or at in self.rungs or self._evaluated_at(at))

    @property
    def wants_slot(self) -> bool:
        """Whether it will need a slot after the next boundary."""
        return not self.holds and self.cancelled is None

    @property
    def standing(self) -> tuple[int, int]:
        """A key by which the least job is served first: higher priority, then earlier arrival."""
        return -self.spec.train.priority, self.arrival

    def next_batch(self) -> GlobalBatch:
        """The global batch of the next step that was not sent to the worker."""
        return self._batch(self.step + self.flying + 1)

    def later_batch(self) -> GlobalBatch | None:
        """The global batch of the step after the one to come; None if the job will probably not take it at
        once, because it is done or at a rung by then.
        """
        if self.step + 1 >= self.order.steps or self.step + 1 in self.rungs:
            return None
        return self._batch(self.step + 2)

    def _batch(self, step: int) -> GlobalBatch:
        return training_batch(self.spec, self.order, self.data.train, step)

    def validation_batch(self) -> GlobalBatch:
        """The validation split as a batch, after the steps done."""
        return validation_batch(self.spec, self.data.validation, self.step)

    def next_step(self) -> StepJob:
        """The next step that was not sent to the worker, at its learning rate."""
        return StepJob(self.name, self.step + self.flying + 1, self.rate_of(self.step + self.flying + 1))

    def rate_of(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate(self.spec.train, step, self.order.steps)

    def reach(self) -> None:
        """Wait here if this is a rung that it has not passed."""
        if self.step in self.rungs and self.step > self.passed and not self.done:
            self.holds.add(PauseReason.AT_RUNG)
            self.reached = self.step

    def release(self, hold: PauseReason) -> None:
        """Stop waiting for this reason."""
        self.holds.discard(hold)
        if hold == PauseReason.AT_RUNG:
            self.passed = max(self.step, self.reached)  # it may have fallen back since

    def fall_back(self, cursor: Cursor, checkpoint: Path | None) -> None:
        """Continue from the last checkpoint, or from the beginning: what came after it is trained again."""
        self.cursor = replace(cursor, device_ns=self.cursor.device_ns)
        self.resume_from = checkpoint or self.resume_from
        self.holds.discard(PauseReason.AT_RUNG)
        self.evaluated = None
        self.flying, self.attaching = 0, False

    def resume_at(self, cursor: Cursor) -> None:
        """Continue from a checkpoint's cursor.

        The checkpoint includes the device time up to its saving, the records also what was spent after it. If
        this process trained the job before, its own account includes both and the time spent since; otherwise
        it has only the time of failed attempts to attach it.
        """
        before, known = self.cursor.device_ns, max(cursor.device_ns, round(self.recorded * NANOSECONDS))
        spent = max(before, known) if self.started else before + known
        if not self.started:
            self.earlier = cursor.completion_seconds
        self.cursor, self.started = replace(cursor, device_ns=spent), True
        self.reach()

    def completion_seconds(self, now: float) -> float:
        """Seconds since its submission, in all processes."""
        return self.earlier + now - self.submitted

    def cursor_at(self, now: float) -> Cursor:
        """Its progress, for a checkpoint taken now."""
        return replace(self.cursor, completion_seconds=self.completion_seconds(now))

    def charge(self, device_ns: int) -> None:
        """Add device time."""
        self.cursor = replace(self.cursor, device_ns=self.cursor.device_ns + device_ns)

    def advance(self, tokens: int, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """Count one optimiser step over ``tokens`` real tokens."""
        self.cursor = replace(
            self.cursor,
            step=self.step + 1,
            tokens=self.cursor.tokens + tokens,
            loss=loss,
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
        )
        self.reach()

    def evaluate(self, loss: float) -> bool:
        """Note an evaluation after the steps done; return whether it is the best so far, so that its weights
        are kept.

        Among equal losses the first is best. A job that resumes may be evaluated at its checkpoint again.
        """
        self.eval_loss, self.evaluated = loss, self.step
        best = self.cursor.best_loss
        if self.spec.train.keep != "best" or (best is not None and loss >= best):
            return False
        self.cursor = replace(self.cursor, best_step=self.step, best_loss=loss)
        return True

    @property
    def keeps_most_accurate(self) -> bool:
        """Whether its adapter is that of the evaluation with the highest accuracy."""
        return self.spec.train.keep == "best_accuracy"

    def answer(self, accuracy: float) -> bool:
        """Note the accuracy at an evaluation; return whether its weights are kept, as :meth:`evaluate`."""
        best = self.cursor.best_accuracy
        if not self.keeps_most_accurate or (best is not None and accuracy <= best):
            return False
        self.cursor = replace(
            self.cursor, best_step=self.step, best_loss=self.eval_loss, best_accuracy=accuracy
        )
        return True

    def ended(
        self,
        state: JobState,
        reason: str,
        now: float,
        *,
        adapter: Path | None = None,
        checkpoint: Path | None = None,
    ) -> JobResult:
        """Its result. A finished job's validation loss is that of its adapter. A job that should have resumed
        but never did has no figures of this process."""
        here = self.started or self.resume_from is None
        best = self.cursor.best_loss if state == JobState.FINISHED else None
        return JobResult(
            job=self.name,
            state=state,
            step=self.step,
            reason=reason,
            eval_loss=self.eval_loss if best is None else best,
            tokens=self.cursor.tokens,
            device_seconds=self.cursor.device_seconds,
            completion_seconds=self.completion_seconds(now) if here else None,
            adapter=adapter,
            checkpoint=checkpoint,
        )


def admit(
    ordered: Iterable[Job], fits: Callable[[Sequence[Job]], bool], max_jobs: int | None = None
) -> list[Job]:
    """The jobs of the next iteration (mLoRA §3.4): by priority, then arrival, as far as memory allows.

    One that does not fit in addition to those before it is passed over, and later ones may use the room. It
    is considered first again next time, and those that took its room are preempted as soon as it fits, so no
    job waits forever behind later ones.

    Args:
        ordered: those that train or could, by priority, then arrival.
        fits: whether a group fits into memory; a smaller group must fit if a larger one does.
        max_jobs: most jobs at once; None leaves it to memory.
    """
    chosen: list[Job] = []
    for job in ordered:
        if (max_jobs is None or len(chosen) < max_jobs) and fits([*chosen, job]):
            chosen.append(job)
    return chosen


class Roster:
    """The jobs of one worker, and the choice of those that train next.

    Args:
        max_jobs: most jobs that train at once; None leaves it to memory.

    Attributes:
        waiting: jobs that wait for a slot, by priority, then arrival.
        live: jobs on the worker, by name.
        paused: jobs that are saved and not on the worker; they need no slot until nothing holds them.
    """

    def __init__(self, admission: Admission, max_jobs: int | None) -> None:
        self._admission = admission
        self._asked_for = self._max_jobs = max_jobs
        self._every = 1  # once memory ran out: job ends before a larger group is tried
        self._ends_left: int | None = None  # until then; None if memory never ran out
        self._tried = False  # since memory last ran out
        self.waiting: list[LiveJob] = []
        self.live: dict[str, LiveJob] = {}
        self.paused: dict[str, LiveJob] = {}

    def all(self) -> list[LiveJob]:
        """Every job that has not ended."""
        return [*self.live.values(), *self.waiting, *self.paused.values()]

    def find(self, name: str) -> LiveJob | None:
        """The job with this name, live or not."""
        return next((job for job in self.all() if job.name == name), None)

    def queue(self, job: LiveJob) -> None:
        """Queue a job for a slot; it keeps its arrival number."""
        self.remove(job)
        self.waiting.append(job)
        self.waiting.sort(key=lambda each: each.standing)

    def start(self, job: LiveJob) -> None:
        """Give a job a slot."""
        self.remove(job)
        self.live[job.name] = job

    def pause(self, job: LiveJob) -> None:
        """Set a job aside until nothing holds it."""
        self.remove(job)
        self.paused[job.name] = job

    def remove(self, job: LiveJob) -> None:
        """Remove a job, if it is here."""
        self.live.pop(job.name, None)
        self.paused.pop(job.name, None)
        self.waiting = [each for each in self.waiting if each is not job]

    def end(self, job: LiveJob) -> None:
        """Remove a job that has ended."""
        self.remove(job)
        if self._ends_left is None or self._max_jobs is None or self._max_jobs == self._asked_for:
            return
        self._ends_left -= 1
        if self._ends_left == 0:
            self._max_jobs += 1
            self._ends_left, self._tried = self._every, True

    def choose(self) -> tuple[list[LiveJob], list[LiveJob]]:
        """The jobs that start now, and those that are preempted (:func:`admit`).

        A job that was accepted can always train alone, whatever was learnt since.
        """
        ordered = sorted([*self.live.values(), *self.waiting], key=lambda job: job.standing)
        available = max([self._admission.budget, *(self._predicted([job]) for job in ordered)])
        chosen = admit(ordered, lambda group: self._predicted(group) <= available, self._max_jobs)
        started = [job for job in chosen if job.name not in self.live]
        return started, [job for job in ordered if job.name in self.live and job not in chosen]

    def _predicted(self, group: Iterable[LiveJob]) -> int:
        return self._admission.predicted([job.demand for job in group])

    def free_slots(self, most: int) -> int:
        """How many more jobs would start immediately if they were as large as the largest that needs a slot.

        At least 1 if none needs one, because a job that was accepted can train alone.
        """
        taken = [job.demand for job in self.all() if job.wants_slot]
        largest = max(taken, key=lambda demand: demand.adapter_bytes, default=None) or self._admission.usual
        # Memory grows with the number of jobs, so the first number that does not fit is found by bisection.
        beyond = bisect_left(range(1, most + 1), True, key=lambda n: not self._fits([*taken, *[largest] * n]))
        return max(beyond, 0 if taken else 1)

    def shrink(self) -> None:
        """Note that the live group ran out of memory despite the prediction; no group this large is formed
        for a while.

        Other jobs may fit even if these did not, so a group larger by one is tried after some jobs have
        ended: first after 1, then after 2, 4, 8. If memory stays short, a search of n jobs therefore runs out
        of it only about log2(n) times.
        """
        self._max_jobs = len(self.live) - 1
        self._every *= 2 if self._tried else 1
        self._ends_left, self._tried = self._every, False

    def _fits(self, demands: list[Demand]) -> bool:
        return (self._max_jobs is None or len(demands) <= self._max_jobs) and self._admission.fits(demands)

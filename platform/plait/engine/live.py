"""What the coordinator knows of one job: plain, mutable, without a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import Cursor
from plait.core.plans import GlobalBatch
from plait.core.samples import TokenisedData
from plait.engine.accounting import NANOSECONDS
from plait.engine.admission import Demand
from plait.engine.order import DataOrder, training_batch, validation_batch
from plait.engine.rates import learning_rate


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job from its submission to its end.

    Attributes:
        arrival: its place in the order of submissions.
        submitted: time of submission, on the coordinator's clock.
        earlier: seconds from submission to last state in earlier processes.
        cursor: how far it has come.
        eval_loss: of the last evaluation.
        cancelled: the state in which it is to end, and why; None while it goes on.
        rungs: steps after which it waits until it is let past.
        measured: whether the validation loss is wanted at every rung.
        passed: the last rung that it was let past.
        holds: why it may not train now; empty while it may.
        evaluated: step of the last evaluation.
        warm_from: folder of the weights that it begins with; None for fresh ones.
        begun: whether this process has trained it.
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
    passed: int = 0
    holds: set[PauseReason] = field(default_factory=set)
    evaluated: int | None = None
    warm_from: Path | None = None
    begun: bool = False

    @property
    def name(self) -> str:
        """Of the job."""
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
        """Whether the validation loss is wanted after the step just done."""
        if len(self.data.validation) == 0 or self.evaluated == self.step:
            return False
        every = self.spec.train.eval_every
        at_rung = self.measured and self.step in self.rungs
        return self.done or at_rung or (every > 0 and self.step > 0 and self.step % every == 0)

    @property
    def trains(self) -> bool:
        """Whether its next step may be taken."""
        return not self.done and not self.holds

    @property
    def keeps_place(self) -> bool:
        """Whether it will still want its place after the next boundary."""
        return not self.holds and self.cancelled is None

    @property
    def standing(self) -> tuple[int, int]:
        """Whoever has less is served first: higher priority, then earlier arrival."""
        return -self.spec.train.priority, self.arrival

    def next_batch(self) -> GlobalBatch:
        """The global batch of the step to come."""
        return training_batch(self.spec, self.order, self.data.train, self.step + 1)

    def validation_batch(self) -> GlobalBatch:
        """The validation split, after the steps done."""
        return validation_batch(self.spec, self.data.validation, self.step)

    def next_rate(self) -> float:
        """Learning rate of the step to come."""
        return learning_rate(self.spec.train, self.step + 1, self.order.steps)

    def reach(self) -> None:
        """Wait here if this is a rung that it was not let past."""
        if self.step in self.rungs and self.step > self.passed and not self.done:
            self.holds.add(PauseReason.AT_RUNG)

    def release(self, hold: PauseReason) -> None:
        """No longer wait for this reason."""
        self.holds.discard(hold)
        if hold == PauseReason.AT_RUNG:
            self.passed = self.step

    def go_on_from(self, cursor: Cursor) -> None:
        """Take up a job where its state says.

        The state has the device time up to its saving. This process's account has that too if it trained the
        job before, with what was spent since; else only what was spent on taking it in, in vain.
        """
        before = self.cursor.device_ns
        spent = max(before, cursor.device_ns) if self.begun else before + cursor.device_ns
        if not self.begun:
            self.earlier = cursor.completion_seconds
        self.cursor, self.begun = replace(cursor, device_ns=spent), True
        self.reach()

    def completion_seconds(self, now: float) -> float:
        """Since its submission, in all processes."""
        return self.earlier + now - self.submitted

    def cursor_at(self, now: float) -> Cursor:
        """How far it has come, for a state that is saved now."""
        return replace(self.cursor, completion_seconds=self.completion_seconds(now))

    def charge(self, device_ns: int) -> None:
        """Add device time."""
        self.cursor = replace(self.cursor, device_ns=self.cursor.device_ns + device_ns)

    def advance(self, tokens: int) -> None:
        """Count one optimiser step over ``tokens`` real tokens."""
        self.cursor = replace(self.cursor, step=self.step + 1, tokens=self.cursor.tokens + tokens)
        self.reach()

    def evaluate(self, loss: float) -> bool:
        """Take in an evaluation after the steps done; whether its weights are to be kept: the best so far.

        Of equal losses the first is best. A job that goes on from a state may be evaluated there again.
        """
        self.eval_loss, self.evaluated = loss, self.step
        best = self.cursor.best_loss
        if self.spec.train.keep != "best" or (best is not None and loss >= best):
            return False
        self.cursor = replace(self.cursor, best_step=self.step, best_loss=loss)
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
        """How it ended. A finished job's validation loss is that of its adapter."""
        best = self.cursor.best_loss if state == JobState.FINISHED else None
        return JobResult(
            job=self.name,
            state=state,
            step=self.step,
            reason=reason,
            eval_loss=self.eval_loss if best is None else best,
            tokens=self.cursor.tokens,
            device_seconds=self.cursor.device_ns / NANOSECONDS,
            completion_seconds=self.completion_seconds(now),
            adapter=adapter,
            checkpoint=checkpoint,
        )

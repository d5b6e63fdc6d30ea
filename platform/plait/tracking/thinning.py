"""Which steps of a curve are written: MLflow's pages draw a few hundred points of a line, whatever there is.

A step is kept or left out by its number alone, so that a job that goes on from a checkpoint, or is trained
again, has the same points. Kept are the first step, the last, every ``stride``-th between them and the one
with the lowest training loss; that one is known only when the job is over, and is written then.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.tracking.encoding import Held
from plait.tracking.names import TRAIN_LOSS
from plait.tracking.operations import LogPoints


def grown_stride(step: int, points: int) -> int:
    """Stride at a step of a curve whose length nobody knows: a power of two that doubles whenever the steps
    do, from a quarter of ``points`` on. Of T steps it keeps about points / 4 · (1 + log2(4 T / points))."""
    return 1 << max(0, (step // max(1, points // 4)).bit_length() - 1)


def is_kept(step: int, stride: int) -> bool:
    """Whether a step other than the last is written."""
    return step <= 1 or step % stride == 0


def _loss(point: LogPoints) -> float:
    return next((value for key, value in point.values if key == TRAIN_LOSS), float("inf"))


@dataclass(slots=True)
class Curve:
    """The steps of one job.

    Attributes:
        run: its key.
        steps: optimiser steps in all.
        stride: every how many steps are written.
        best: the step with the lowest training loss, the earliest of several.
        last: the newest step.
        noted: whether ``best`` and ``last`` are in the spool as they are.
    """

    run: str
    steps: int
    stride: int
    best: LogPoints | None = None
    last: LogPoints | None = None
    noted: bool = True

    @classmethod
    def of(cls, run: str, steps: int, points: int, held: Held | None) -> Curve:
        """The curve of a job that begins, or goes on with what an earlier process held back of it."""
        curve = cls(run, steps, max(1, -(-steps // points)))
        if held is not None:
            curve.best, curve.last = held.best, held.last
        return curve

    def take(self, point: LogPoints) -> bool:
        """Take note of a step; whether it is written now."""
        if self.last is None or point.step > self.last.step:
            self.last = point
        if self.best is None or _loss(point) < _loss(self.best):
            self.best = point
        self.noted = False
        return self._kept(point.step)

    def _kept(self, step: int) -> bool:
        return step == self.steps or is_kept(step, self.stride)

    def held(self) -> Held | None:
        """What another process would need to know and is not yet in the spool; nothing where every step is
        written."""
        if self.noted or self.stride == 1:
            return None
        return Held(self.run, self.best, self.last)

    def remainder(self) -> list[LogPoints]:
        """What is still to be written when the job is over: its newest step, then its best one as late."""
        points = []
        if self.last is not None and not self._kept(self.last.step):
            points.append(self.last)
        best = self.best
        if best is not None and best is not self.last and not self._kept(best.step):
            points.append(LogPoints(best.run, best.step, best.time_ms, best.values, late=True))
        return points

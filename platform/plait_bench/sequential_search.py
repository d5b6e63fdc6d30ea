"""The other side of ``search_vs_sequential``: transformers + PEFT, one trial after another, each to its end.

Every trial is evaluated where the search has its rungs and at its end, and each part is timed by itself. So
one run of all trials tells what a search without a pruner takes (which evaluates at the ends alone), and, by
replay through the same rules, what a search takes that trains no trial further than its rungs allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from plait.core.jobs import JobSpec
from plait.core.samples import Split
from plait_bench.joint_side import JointSide
from plait_bench.peft_baseline import InitialWeights, PeftBaseline, Training
from plait_bench.recorded_curves import Curve, Point
from plait_bench.replay_study import parameters_apart


class SequentialSearch:
    """Trains one trial after another.

    Args:
        baseline: PEFT's model.
        side: data.
        jobs: all different.
        initial: weights that the adapter of each begins with.
        steps: after which each is evaluated; the last is the budget.
        batch_size: of evaluations.

    Attributes:
        curves: of the trials trained so far.
    """

    def __init__(
        self,
        baseline: PeftBaseline,
        side: JointSide,
        jobs: Sequence[JobSpec],
        initial: Sequence[InitialWeights],
        steps: Sequence[int],
        batch_size: int,
    ) -> None:
        self._baseline = baseline
        self._side = side
        self._jobs = jobs
        self._initial = initial
        self._steps = steps
        self._batch_size = batch_size
        self._points = parameters_apart(jobs)
        self.curves: list[Curve] = []

    @property
    def done(self) -> bool:
        """Whether every trial is trained."""
        return len(self.curves) == len(self._jobs)

    def advance(self) -> None:
        """Train and evaluate the next trial."""
        index = len(self.curves)
        job = self._jobs[index]
        data = self._side.data.of(job.data)
        with self._baseline.training(job, data.train, self._initial[index]) as training:
            points = self._train(training, data.validation)
        self.curves.append(Curve(self._points[index], tuple(points)))

    def _train(self, training: Training, validation: Split) -> list[Point]:
        points: list[Point] = []
        seconds = 0.0
        for step in self._steps:
            began = perf_counter()
            while training.done < step:
                train_loss = training.step()
            trained = perf_counter()
            loss = training.evaluate(validation, self._batch_size)
            seconds += trained - began
            points.append(Point(step, loss, seconds, perf_counter() - trained, train_loss))
        return points

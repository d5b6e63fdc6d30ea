"""Which replicas the processes of a run should make for the jobs that train: asked whenever these change.

A replica of more processes takes longer samples, since its memory adds up, and works less efficiently. So the
best deployment follows the lengths of the jobs that train (LobRA Eq. 2). What a change would save over the
steps to come is weighed against the restart that it takes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median

from plait.core.errors import CapacityError
from plait.core.plans import Replica, ReplicaShape
from plait.core.settings import RunSettings
from plait.cost.profile_store import Profile
from plait.cost.replica import Configuration, ReplicaCost
from plait.engine.jobs import LiveJob
from plait.engine.replicas import cut, dispatch_time, fitting_capacity
from plait.engine.worker import WorkerFacts
from plait.planner.buckets import mean_step
from plait.planner.weighing import Change, MeanStep, weigh_change

AHEAD = 32  # steps of each job whose lengths make the mean step
MEASURED = 4  # iterations of the same jobs after which their seconds are known
ASSUMED_SECONDS, ASSUMED_BYTES = 5.0, 1e9  # of a restart, and loaded in one second, before one was measured
Prefer = Callable[[tuple[int, ...]], None]


class Redeployment:
    """Weighs the deployment of one run's processes, if the settings want it.

    Args:
        prefer: gets how many processes each replica should have; None: there is no choice.

    Attributes:
        restart_seconds: of the last change; at first an assumption.
    """

    def __init__(self, settings: RunSettings, profile: Profile | None, prefer: Prefer | None) -> None:
        self._settings, self._profile = settings, profile
        self._prefer = prefer if settings.cluster.redeploy else None
        self._capacities: dict[int, int] = {}  # of replicas, by their processes
        self._splits: dict[int, tuple[int, ...]] = {}  # layers of their stages
        self._jobs = frozenset[str]()  # that were weighed last
        self._due = False  # to be weighed again
        self._expected = 0.0  # seconds of a step of theirs by the model
        self._seconds = deque[float](maxlen=AHEAD)  # measured, of such steps
        self._scale = 1.0 if profile is not None and profile.time is not None else None
        self.restart_seconds: float | None = None

    def use(self, facts: WorkerFacts, replicas: Sequence[Replica]) -> None:
        """Count with these replicas from now on."""
        if self._prefer is None:
            return
        self._time = dispatch_time(facts, self._profile)
        stages = [each.pp for each in replicas]
        least = min(part.memory_bytes for own in facts.parts for part in own)
        given = self._settings.cluster.capacities
        self._processes = sum(stages)
        self._capacities = {}
        for count in range(1, min(self._processes, facts.shape.layers) + 1):
            own = facts.of(cut(facts, self._settings, (ReplicaShape(count),), least)[0])
            (self._splits[count],) = own.splits
            capacity, fits = (
                (count * min(given), True) if given else fitting_capacity(own, self._settings, self._profile)
            )
            if fits:
                self._capacities[count] = capacity
        self._current = Counter(stages)
        self._weight_bytes = facts.shape.weight_bytes
        self._jobs = frozenset()

    @property
    def widest(self) -> int:
        """Most tokens of a microbatch on any replica that the processes could make."""
        return max(self._capacities.values(), default=0)

    def took(self, seconds: float) -> None:
        """An iteration of the jobs that were weighed last took so long."""
        self._seconds.append(seconds)
        self._due |= len(self._seconds) == MEASURED

    def change(self, jobs: Sequence[LiveJob]) -> bool:
        """Whether the deployment should change for these jobs; then who makes replicas knows how."""
        if self._prefer is None or not self._capacities:
            return False
        names = frozenset(job.name for job in jobs if job.trains)
        if not names or (names == self._jobs and not self._due):
            return False
        if self._expected and len(self._seconds) >= MEASURED:
            self._scale = median(self._seconds) / self._expected
        change = self._weigh(self._mean_step([job for job in jobs if job.name in names]))
        if change is not None and change.pays and change.planned is not None:
            self._prefer(tuple(sorted(each.pp for each in change.planned.single)))
            return True  # weighed again if it cannot be made now
        if names != self._jobs:
            self._jobs = names
            self._seconds.clear()
        self._due = False
        self._expected = 0.0 if change is None or change.kept is None else change.kept.makespan
        return False

    def _weigh(self, step: MeanStep) -> Change | None:
        """The best change; None if a sample fits only into replicas that are there, whose processes may have
        more memory than each has for certain."""
        shape = [(self._configuration(count), number) for count, number in sorted(self._current.items())]
        scale = self._scale or 0.0  # unknown: only what is required is done
        restart = self.restart_seconds
        if restart is None:
            restart = ASSUMED_SECONDS + self._weight_bytes / ASSUMED_BYTES
        try:
            return weigh_change(shape, step, restart / scale if scale else float("inf"))
        except CapacityError:
            return None

    def _configuration(self, count: int) -> Configuration:
        capacity = self._capacities.get(count) or self.widest
        return Configuration(1, count, capacity, layer_split=self._splits[count])

    def _mean_step(self, jobs: Sequence[LiveJob]) -> MeanStep:
        lengths = [job.demand.longest for job in jobs]  # which may come, whatever comes first
        labelled = 0.0
        for job in jobs:
            sizes = job.data.train.lengths
            for number in range(job.step + 1, min(job.step + AHEAD, job.order.steps) + 1):
                lengths += [int(sizes[sample]) for sample in job.order.at(number)[0]]
            labelled += float(job.data.train.labelled.sum() / sizes.sum()) / len(jobs)
        left = max(job.order.steps - job.step for job in jobs)
        allowed = [self._configuration(count) for count in self._capacities.keys() | self._current.keys()]
        step = mean_step(lengths, min(left, AHEAD), required={each.max_tokens for each in allowed})
        costs = (
            ReplicaCost.of(each, step.means, self._time, labelled_share=labelled) for each in sorted(allowed)
        )
        return MeanStep(tuple(costs), step.counts, left, {"": self._processes})

"""LobRA's comparison of ways to train several tasks, measured on this machine by processor seconds.

One process does the work of all replicas, one after the other, so that none waits for another's core: a step
takes as long as the replica with the most processor seconds, and costs that for every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from statistics import median

import numpy as np

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.messages import Attach, StepJob
from plait.core.plans import GlobalBatch, Microbatch, Replica, Segment
from plait.core.samples import Sample, Split, TokenisedData
from plait.core.settings import RunSettings
from plait.cost.replica import Configuration
from plait.cost.time import MicrobatchShape, TimeModel
from plait.engine.build import settle_dtype
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import choose_device
from plait.engine.local_worker import LocalWorker
from plait.engine.packer import Packer
from plait.models.load import load_model
from plait.planner.buckets import BUCKETS, dynamic_buckets
from plait.planner.dispatch_step import Replicas, plan_step
from plait.utils.paths import cache_dir
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, require_processor
from plait_bench.lobra import ALIGNED, Assumption, Task, drawn_steps
from plait_bench.processor_time import fitted_time, timed
from plait_bench.progress import part

FUSED, PLAIT = "Task-Fused", "Plait: packed, dispatched"
VOCABULARY = 200  # token ids are drawn below it: any model has so many
RATE = 1e-4  # of learning
PADDED = " padded"  # of a job's name
Turn = Sequence[Sequence[Microbatch]]  # by replica: what runs until the jobs in it step


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the comparison.

    Attributes:
        capacities: most tokens of a microbatch, by replica.
    """

    tasks: tuple[Task, ...]
    capacities: tuple[int, ...]
    assumption: Assumption = Assumption()  # noqa: RUF009
    steps: Count = 3
    rank: Count = 16

    def __post_init__(self) -> None:
        if len(self.tasks) < 2 or len(self.capacities) < 2 or self.assumption.clip > max(self.capacities):
            raise ConfigError(
                f"{len(self.tasks)} tasks, capacities {list(self.capacities)}, clip {self.assumption.clip}",
                "Several tasks are trained on several replicas, of which one takes the longest sample.",
                f"Set {OPTIONS}.tasks, {OPTIONS}.capacities and {OPTIONS}.assumption.clip.",
            )


class Drawn:
    """The drawn samples of all tasks: real, and padded to the boundaries of their buckets.

    Attributes:
        jobs: one for each task, then one for each with padded samples.
    """

    def __init__(self, options: Options) -> None:
        self._lengths = {
            task.name: [int(each) for each in drawn_steps([task], options.assumption, options.steps).ravel()]
            for task in options.tasks
        }
        every = [length for own in self._lengths.values() for length in own]
        found = dynamic_buckets(
            every, buckets=BUCKETS, interval=ALIGNED, required=sorted(set(options.capacities))
        )
        self._edges = np.asarray(found.lengths)
        self.jobs = [
            JobSpec(
                task.name + suffix,
                AdapterSpec(options.rank),
                TrainSpec(steps=options.steps, batch_size=task.batch_size, seed=number),
                DataSpec.of("drawn", task=task.name, padded=bool(suffix)),
            )
            for suffix in ("", PADDED)
            for number, task in enumerate(options.tasks)
        ]

    def load(self, spec: DataSpec) -> TokenisedData:
        """The samples of a task; what is padded is not labelled."""
        asked = spec.mapping()
        source = np.random.default_rng(len(asked["task"]))
        samples = []
        for length in self._lengths[asked["task"]]:
            tokens = source.integers(3, VOCABULARY, length).astype(np.int32)
            more = self.boundary(length) - length if asked["padded"] else 0
            labels = np.arange(length + more) < length
            samples.append(Sample(np.concatenate([tokens, np.zeros(more, np.int32)]), labels))
        return TokenisedData(spec.options, Split.of(samples), Split.of([]))

    def boundary(self, length: int) -> int:
        """The boundary of a sample's bucket."""
        return int(self._edges[np.searchsorted(self._edges, length)])

    def shape(self, microbatch: Microbatch) -> MicrobatchShape:
        """What the seconds of a microbatch depend on; padding is not labelled."""
        segments = microbatch.segments
        labelled = sum(
            self._lengths[each.job.removesuffix(PADDED)][sample] - 1
            for each in segments
            for sample in each.samples
        )
        return MicrobatchShape.of([length for each in segments for length in each.lengths], labelled=labelled)

    def bucketed(
        self, replica: int, places: Sequence[tuple[GlobalBatch, int, int]], capacity: int
    ) -> list[Microbatch]:
        """Microbatches of as many sequences of one bucket as fit."""

        def key(place: tuple[GlobalBatch, int, int]) -> int:
            return self.boundary(place[2])

        made: list[Microbatch] = []
        for boundary, group in groupby(sorted(places, key=key), key):
            own, most = list(group), capacity // boundary
            for first in range(0, len(own), most):
                made.append(Microbatch(replica, len(made), _segments(own[first : first + most], boundary)))
        return made

    def batch(self, task: Task, step: int) -> GlobalBatch:
        """The global batch of a task."""
        places = tuple(range(step * task.batch_size, (step + 1) * task.batch_size))
        lengths = tuple(self._lengths[task.name][place] for place in places)
        weight = 1.0 / sum(length - 1 for length in lengths) if max(lengths) > 1 else 1.0
        return GlobalBatch(task.name, step + 1, places, (0,) * len(places), lengths, weight)


@dataclass(frozen=True, slots=True)
class Machine:
    """A loaded model, and the seconds of its microbatches and steps as measured beforehand."""

    worker: LocalWorker
    drawn: Drawn
    capacities: tuple[int, ...]
    time: TimeModel
    step_seconds: float

    def uniform(self, batches: Sequence[GlobalBatch]) -> Turn:
        """Samples in turn to replicas that are all as large as the largest, padded in buckets."""
        count, places = len(self.capacities), _places(batches)
        return [
            self.drawn.bucketed(replica, places[replica::count], max(self.capacities))
            for replica in range(count)
        ]

    def balanced(self, batches: Sequence[GlobalBatch]) -> Turn:
        """LobRA: samples by its dispatch to the replicas as they are, padded in buckets."""
        places = _places(batches)
        kinds = tuple((Configuration(1, 1, each), self.time, 1) for each in self.capacities)
        chosen = plan_step([length for *_, length in places], Replicas(kinds)).replica_of
        return [
            self.drawn.bucketed(
                number, [place for place, own in zip(places, chosen, strict=True) if own == number], each
            )
            for number, each in enumerate(self.capacities)
        ]

    def packed(self, batches: Sequence[GlobalBatch]) -> Turn:
        """Plait: dispatched and packed as in training, without padding."""
        replicas = [Replica(number, capacity=each) for number, each in enumerate(self.capacities)]
        found = Packer(replicas, self.time).pack(batches)
        return [[each for each in found if each.replica == number.id] for number in replicas]

    def measured(self, turn: Turn) -> float:
        """Processor seconds of a turn, of all replicas until the slowest is done."""
        seconds = [timed(self.worker, own) for own in turn]
        return len(turn) * (max(seconds) + self._stepped(turn))

    def _stepped(self, turn: Turn) -> float:
        jobs = {(each.job, each.step) for own in turn for batch in own for each in batch.segments}
        return timed(self.worker, [StepJob(job, step, RATE) for job, step in sorted(jobs)])

    def simulated(self, turn: Turn) -> float:
        """The same by the cost model."""
        seconds = [sum(self.time.microbatch(self.drawn.shape(each)) for each in own) for own in turn]
        jobs = {each.job for own in turn for batch in own for each in batch.segments}
        return len(turn) * (max(seconds) + self.step_seconds * len(jobs))


Way = Callable[[Machine, Sequence[GlobalBatch]], Sequence[Turn]]
WAYS: Mapping[str, Way] = {
    FUSED: lambda machine, batches: [machine.uniform(batches)],
    "Task-Sequential": lambda machine, batches: [machine.uniform([each]) for each in batches],
    "LobRA-Sequential": lambda machine, batches: [machine.balanced([each]) for each in batches],
    "LobRA: fused, balanced": lambda machine, batches: [machine.balanced(batches)],
    PLAIT: lambda machine, batches: [machine.packed(batches)],
}


@benchmark("lobra/measured", Options)
def measured(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Train the same drawn samples in each way, in turns.

    Raises:
        ConfigError: another device than the processor, or a wrong option.
        PlaitError: the ways trained on different samples.
    """
    require_processor(settings)
    machine = _prepare(settle_dtype(settings), asked)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for turn in WAYS[PLAIT](machine, [machine.drawn.batch(task, 0) for task in asked.tasks]):
        machine.measured(turn)  # one-time costs
    piece = part("steps, each in five ways", asked.steps * len(WAYS))
    for step in range(asked.steps):
        batches = [machine.drawn.batch(task, step) for task in asked.tasks]
        ways = {name: way(machine, batches) for name, way in WAYS.items()}
        _check(ways)
        for name in list(ways)[:: 1 if step % 2 else -1]:
            piece(f"step {step + 1}: {name}")
            turns = ways[name]
            found[name].append((sum(map(machine.measured, turns)), sum(map(machine.simulated, turns))))
    return Report(
        "lobra/measured",
        tuple(figure for name in WAYS for figure in _figures(name, found)),
        (
            f"{asked.steps} steps of {len(asked.tasks)} tasks, lengths {asked.assumption}; replicas of "
            f"{', '.join(map(str, asked.capacities))} tokens, those of {FUSED} and Task-Sequential all as "
            f"large as the largest; one adapter of rank {asked.rank} a task; model {settings.model.kind}.",
            "Processor seconds until the slowest replica is done, of all. Each one's part ran by itself.",
            "A step ends with the replica of the longest samples, which are hardly padded: packing others "
            "frees replicas that wait for it.",
        ),
    )


def _figures(name: str, found: Mapping[str, Sequence[tuple[float, float]]]) -> list[Figure]:
    took, said = (median(each) for each in zip(*found[name], strict=True))
    figures = [Figure(f"{name}, a step", took, "s", "measured", Baseline(said, "simulated"))]
    if name != FUSED:
        pairs = [(*own, *fused) for own, fused in zip(found[name], found[FUSED], strict=True)]
        share = median(100 * own / fused for own, _, fused, _ in pairs)
        expected = Baseline(median(100 * own / fused for _, own, _, fused in pairs), "simulated")
        figures.append(Figure(f"{name}, of {FUSED}", share, "%", "measured", expected))
    return figures


def _prepare(settings: RunSettings, asked: Options) -> Machine:
    """Load the model and measure microbatches of every size, for the simulation."""
    drawn, device = Drawn(asked), choose_device(settings.engine.device)
    model = load_model(settings.model, cache=cache_dir(), device=device)
    worker = LocalWorker(model, DataCatalogue(drawn.load), settings.engine)
    for job in drawn.jobs:
        worker.execute(Attach(job))
    probes = [
        each
        for task, step in product(asked.tasks, range(asked.steps))
        for each in _probes(drawn, drawn.batch(task, step), max(asked.capacities))
    ]
    times = fitted_time(worker, probes, drawn.shape)
    steps = [StepJob(job.name, 1, RATE) for job in drawn.jobs]
    stepping = timed(worker, steps) / len(steps)
    return Machine(worker, drawn, asked.capacities, times, stepping)


def _probes(drawn: Drawn, batch: GlobalBatch, capacity: int) -> list[Microbatch]:
    """Microbatches of one to all samples of a batch, as far as they fit, and padded ones: if all tokens are
    labelled, the costs of labels and of tokens are not kept apart."""
    places = _places([batch])
    made = drawn.bucketed(0, places, capacity)
    for count in range(1, len(places) + 1):
        own = [(each, place, length) for each, place, length in places[:count]]
        if sum(length for *_, length in own) <= capacity:
            made.append(Microbatch(0, 0, _segments(own, None)))
    return made


def _places(batches: Sequence[GlobalBatch]) -> list[tuple[GlobalBatch, int, int]]:
    """Every sample: its batch, its place there and its length."""
    return [(batch, place, length) for batch in batches for place, length in enumerate(batch.lengths)]


def _segments(places: Sequence[tuple[GlobalBatch, int, int]], boundary: int | None) -> tuple[Segment, ...]:
    """Samples of one microbatch by job, padded to a boundary if there is one."""
    made = []
    for job in dict.fromkeys(batch.job for batch, *_ in places):
        own = [each for each in places if each[0].job == job]
        batch = own[0][0]
        made.append(
            Segment(
                job if boundary is None else job + PADDED,
                batch.step,
                tuple(batch.samples[place] for _, place, _ in own),
                (0,) * len(own),
                tuple(boundary or length for *_, length in own),
                batch.loss_weight,
            )
        )
    return tuple(made)


def _check(ways: Mapping[str, Sequence[Turn]]) -> None:
    """See that all ways train on the same samples, each once.

    Raises:
        PlaitError: they do not.
    """
    seen = {
        name: sorted(
            (each.job.removesuffix(PADDED), sample)
            for turn in turns
            for own in turn
            for batch in own
            for each in batch.segments
            for sample in each.samples
        )
        for name, turns in ways.items()
    }
    if any(own != seen[FUSED] for own in seen.values()):
        raise PlaitError("ways that train on different samples", "Each trains on every drawn sample once.")

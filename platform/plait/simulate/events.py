"""The simulator: forwards, backwards and optimiser steps as discrete events over stages and replicas.

A stage runs one thing at a time. The forward of a microbatch needs that of the previous stage, the backward
that of the next stage. On the first stage, a forward also needs the previous step of every job in it, and a
step needs the backwards of its whole global batch, on all replicas. Numbers are only added and compared, so
seconds given as integers or fractions give exact results; only ports that messages share divide them.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from plait.core.errors import PlaitError
from plait.cost.time import EMPTY, MicrobatchShape, StageTime
from plait.simulate.ports import Ports, Way

Kind = Literal["forward", "backward"]
Ready = Mapping[Kind, Collection[int]]  # microbatches whose inputs are available
Key = tuple[str, int]  # a job and one of its steps
Link = tuple[int, int, Kind]  # of a replica, to a stage


class Action(NamedTuple):
    """The forward or backward of the microbatch at this position in the schedule."""

    kind: Kind
    work: int


Choose = Callable[[Ready], Action | None]  # from what is ready: what starts; None waits


class Order(Protocol):
    """The rule by which all stages choose."""

    def chooser(self, stage: int, stages: int) -> Choose:
        """The choice function of one stage; it keeps its own position."""


def in_order(actions: Sequence[Action]) -> Choose:
    """A choice function that starts these actions one after another."""
    left = deque(actions)

    def choose(ready: Ready) -> Action | None:
        return left.popleft() if left and left[0].work in ready[left[0].kind] else None

    return choose


@dataclass(frozen=True, slots=True)
class OneFOneB:
    """One forward, one backward; at most stages − s microbatches in flight on stage s.

    Attributes:
        batches: number of microbatches of each global batch; the pipeline is drained after each. A single
            entry for all microbatches means that it is never drained in between.
    """

    batches: Sequence[int]

    def chooser(self, stage: int, stages: int) -> Choose:
        """The choice function of one stage."""
        return in_order(self.actions(stage, stages))

    def actions(self, stage: int, stages: int) -> list[Action]:
        """What one stage does, in this order."""
        ahead, actions, begin = stages - stage, list[Action](), 0
        for count in self.batches:
            for place in range(count + ahead):
                if ahead <= place:
                    actions.append(Action("backward", begin + place - ahead))
                if place < count:
                    actions.append(Action("forward", begin + place))
            begin += count
        return actions


@dataclass(frozen=True, slots=True)
class Work:
    """One microbatch as the simulator sees it; without parts it is a no-op.

    Attributes:
        parts: jobs and steps whose samples it contains.
        shape: what its seconds depend on, including padding rows if they are computed.
        padded: tokens that it takes of the capacity.
    """

    parts: tuple[Key, ...] = ()
    shape: MicrobatchShape = EMPTY
    tokens: int = 0
    padded: int = 0


class Span(NamedTuple):
    """One forward or backward that ran."""

    replica: int
    stage: int
    kind: Kind
    work: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica in a simulation.

    Attributes:
        transfer: seconds in which a neighbour receives the result of each microbatch; overlaps with other
            work. A link sends one result after another, in each direction.
        sizes: of what each link sends, from the first stage's on, over that; empty: all are 1.
        ports: of each stage, through which all that it sends and receives goes. Results between different
            ports go at once and share them; stages can share one. Empty: each link is by itself.
    """

    works: Sequence[Work]
    seconds: Sequence[Sequence[StageTime]]
    order: Order
    transfer: Sequence[float] = ()
    sizes: Sequence[float] = ()
    ports: Sequence[int] = ()

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulation: every span, sorted by end, and the time of each step."""

    spans: tuple[Span, ...]
    steps: Mapping[Key, float]

    @property
    def makespan(self) -> float:
        """Seconds from the start to the last end."""
        return max((span.end for span in self.spans), default=0.0)


class SimulationError(PlaitError, RuntimeError):
    """A schedule cannot run to its end."""


def simulate(pipelines: Mapping[int, Pipeline]) -> Run:
    """Run every replica's microbatches to the end.

    Raises:
        SimulationError: stages wait for each other forever.
    """
    return _Simulation(pipelines).run()


@dataclass(slots=True)
class _Stage:
    place: int  # among all stages, in the order in which they choose
    replica: int
    index: int
    choose: Choose
    busy: bool = False
    ready: dict[Kind, set[int]] = field(default_factory=lambda: {"forward": set(), "backward": set()})


class _Simulation:
    def __init__(self, pipelines: Mapping[int, Pipeline]) -> None:
        self.pipelines = pipelines
        self.stages: dict[tuple[int, int], _Stage] = {}
        for replica, pipeline in pipelines.items():
            for s in range(pipeline.stages):
                choose = pipeline.order.chooser(s, pipeline.stages)
                self.stages[replica, s] = _Stage(len(self.stages), replica, s, choose)
        self.changed: dict[int, _Stage] = {}  # by place: those that may start something now
        self.left: Counter[Key] = Counter(
            key for pipeline in pipelines.values() for work in pipeline.works for key in work.parts
        )
        self.waiting: dict[Key, list[tuple[int, int]]] = {}  # works that wait for a step
        self.blocked: Counter[tuple[int, int]] = Counter()  # number of steps that a work still waits for
        self.links: dict[Link, float] = {}  # until when each sends
        self.ports = Ports()
        self.awaited = 0  # numbers what is awaited of the ports, which each message changes
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now: float = 0
        self.count = 0
        self.spans: list[Span] = []
        self.steps: dict[Key, float] = {}
        self._block()

    def run(self) -> Run:
        self.changed = {stage.place: stage for stage in self.stages.values()}
        self._start()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                heapq.heappop(self.events)[2]()
            self._start()
        wanted = sum(2 * len(pipeline.works) * pipeline.stages for pipeline in self.pipelines.values())
        if len(self.spans) != wanted:
            raise SimulationError(
                f"{wanted - len(self.spans)} of {wanted} forwards and backwards never ran",
                "The stages must not wait for each other in a circle.",
            )
        return Run(tuple(self.spans), dict(self.steps))

    def _block(self) -> None:
        """Make each work wait for the previous step of each of its jobs."""
        order: dict[str, list[int]] = {}
        for job, step in sorted(self.left):
            order.setdefault(job, []).append(step)
        before = {(job, b): (job, a) for job, own in order.items() for a, b in pairwise(own)}
        for replica, pipeline in self.pipelines.items():
            for place, work in enumerate(pipeline.works):
                needs = {before[key] for key in work.parts if key in before}
                for key in needs:
                    self.waiting.setdefault(key, []).append((replica, place))
                self.blocked[replica, place] = len(needs)
                if not needs:
                    self.stages[replica, 0].ready["forward"].add(place)

    def _start(self) -> None:
        """Have stages choose whose inputs changed or that became idle: any other would choose as it did."""
        for _, stage in sorted(self.changed.items()):
            if not stage.busy and (action := stage.choose(stage.ready)) is not None:
                self._begin(stage, action)
        self.changed.clear()

    def _begin(self, stage: _Stage, action: Action) -> None:
        stage.busy = True
        stage.ready[action.kind].discard(action.work)
        seconds = self.pipelines[stage.replica].seconds[stage.index][action.work]
        duration = seconds.forward if action.kind == "forward" else seconds.backward
        start = self.now
        self._at(start + duration, lambda: self._end(stage, action, start))

    def _end(self, stage: _Stage, action: Action, start: float) -> None:
        stage.busy = False
        self.changed[stage.place] = stage
        replica, s, work = stage.replica, stage.index, action.work
        self.spans.append(Span(replica, s, action.kind, work, start, self.now))
        forward = action.kind == "forward"
        target = s + 1 if forward else s - 1
        if target < 0:
            self._finish(replica, work)
        elif target == self.pipelines[replica].stages:
            self._ready(stage, Action("backward", work))
        else:
            self._send(self.stages[replica, target], action)

    def _send(self, target: _Stage, action: Action) -> None:
        pipeline = self.pipelines[target.replica]
        if not pipeline.transfer:
            self._ready(target, action)
            return
        seconds = pipeline.transfer[action.work]
        if pipeline.sizes:
            seconds *= pipeline.sizes[target.index - (action.kind == "forward")]
        if pipeline.ports:
            sender = target.index + (-1 if action.kind == "forward" else 1)
            way: Way = (
                (target.replica, pipeline.ports[sender], "sends"),
                (target.replica, pipeline.ports[target.index], "receives"),
            )
            self.ports.send(self.now, way, seconds, lambda: self._ready(target, action))
            self._await()
            return
        link = (target.replica, target.index, action.kind)
        self.links[link] = max(self.now, self.links.get(link, 0)) + seconds
        self._at(self.links[link], lambda: self._ready(target, action))

    def _await(self) -> None:
        """Have the next message of the ports arrive, unless another changes when."""
        self.awaited += 1
        number, following = self.awaited, self.ports.next()
        if following is None:
            return
        end, way = following

        def arrive() -> None:
            if number == self.awaited:
                self.ports.take(self.now, way)()
                self._await()

        self._at(end, arrive)

    def _ready(self, stage: _Stage, action: Action) -> None:
        stage.ready[action.kind].add(action.work)
        self.changed[stage.place] = stage

    def _finish(self, replica: int, work: int) -> None:
        """Take the steps whose global batch is complete, now that the first stage's backward is done."""
        for key in self.pipelines[replica].works[work].parts:
            self.left[key] -= 1
            if self.left[key]:
                continue
            self.steps[key] = self.now
            for where in self.waiting.pop(key, ()):
                self.blocked[where] -= 1
                if not self.blocked[where]:
                    self._ready(self.stages[where[0], 0], Action("forward", where[1]))

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

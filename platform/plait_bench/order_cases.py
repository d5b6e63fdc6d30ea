"""The cases of the benchmark of orders: lists of instructions by order, stages and adapters, simulated.

A seam: pure Python, so that what processes run and what is simulated come from the same lists and are tested
without processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from plait.core.checks import one_of
from plait.core.plans import GlobalBatch, Microbatch
from plait.cost.time import StageTime
from plait.planner.instructions import Instruction
from plait.planner.packing_exact import GREEDY
from plait.simulate.events import Action, Choose, Pipeline, Run, Work, in_order, simulate
from plait.simulate.lowering import lower
from plait.simulate.orders import ORDERS, OrderName, arrange
from plait_bench.inputs import Count, Counts

Lists = tuple[tuple[Instruction, ...], ...]  # by stage
SLEEP, MODEL = "sleep", "model"  # what stages do


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one stage.

    Attributes:
        forward, backward: of a microbatch.
        step: of one call of the optimiser.
        send: of handing a message over.
        receive: of taking one that has been sent.
    """

    forward: float
    backward: float
    step: float = 0.0
    send: float = 0.0
    receive: float = 0.0

    def of(self, each: Instruction) -> float:
        """Seconds of one instruction."""
        kind = each.kind.partition("_")[0]  # send_hidden, receive_gradient
        return float(getattr(self, kind))


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Options of the benchmark of orders.

    Attributes:
        work: what a stage does: it sleeps, or it trains the run's model.
        stages: numbers of them; each is measured, over as many processes.
        adapters: numbers of them, each trained for ``steps`` steps.
        orders: by name.
        repeats: how often everything is measured; medians are shown.
        microbatches: of each adapter's global batch.
        tokens: of a microbatch.
        width: numbers of a token that sleeping stages send, of 4 bytes.
        forward, backward: milliseconds for which a stage sleeps for a microbatch.
    """

    work: Annotated[str, one_of(SLEEP, MODEL)] = SLEEP
    stages: Counts = (2, 3, 4)
    adapters: Counts = (1, 2, 3, 4)
    orders: tuple[OrderName, ...] = ORDERS
    repeats: Count = 1
    microbatches: Count = 4
    steps: Count = 2
    tokens: Count = 64
    width: Count = 512
    forward: float = 40.0
    backward: float = 80.0

    @property
    def seconds(self) -> Times:
        """Seconds of forward and backward, on every stage."""
        return Times(self.forward / 1000, self.backward / 1000)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator says of a case, from the start of the first microbatch to the end of the last."""

    makespan: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Case:
    """One order with its lists.

    Attributes:
        collective: whether all stages wait for each other at every optimiser step.
        seconds: in which stages sleep, by stage and microbatch; none: those of the options.
    """

    name: OrderName
    stages: int
    adapters: int
    microbatches: tuple[Microbatch, ...]
    lists: Lists
    collective: bool = False
    seconds: tuple[tuple[StageTime, ...], ...] = ()

    @property
    def label(self) -> str:
        """In the table."""
        jobs = f"{self.adapters} adapter{'s' * (self.adapters > 1)}"
        return f"{self.stages} stages, {jobs}, {self.name}"

    def simulated(self, times: Sequence[Times]) -> Simulated:
        """Simulate these lists with the seconds of each stage."""
        return self.replayed(
            [[own.of(each) for each in listed] for listed, own in zip(self.lists, times, strict=True)]
        )

    def replayed(self, seconds: Sequence[Sequence[float]]) -> Simulated:
        """Simulate these lists with the seconds of each of their instructions."""
        places = {
            number: place
            for place, number in enumerate(at for at, each in enumerate(self.microbatches) if each.segments)
        }
        works = [
            Work(tuple((part.job, part.step) for part in each.segments), tokens=each.tokens)
            for each in self.microbatches
            if each.segments
        ]
        taken = [_seconds(own, places, each) for own, each in zip(self.lists, seconds, strict=True)]
        run = simulate({0: Pipeline(works, taken, _Listed(self.lists, places))})
        return Simulated(run.makespan, waiting_share(run, self.stages))


def waiting_share(run: Run, stages: int) -> float:
    """The share of all stages' seconds in which none ran a microbatch."""
    busy = sum(span.end - span.start for span in run.spans)
    return 1 - busy / (stages * run.makespan)


def _seconds(own: Sequence[Instruction], places: dict[int, int], seconds: Sequence[float]) -> list[StageTime]:
    """The seconds of each microbatch on a stage, with those of receiving what it needs and of sending what
    comes of it. A step counts to what runs before it on the first stage, elsewhere to what runs after it,
    after the last one to nothing."""
    found = [StageTime(0.0, 0.0)] * len(places)
    for at, each in enumerate(own):
        to: Instruction | None = each
        if each.kind == "step":
            after = (other for other in own[at + 1 :] if other.microbatch in places)
            following = next(after, None)
            to = own[at - 1] if following and own[at - 1].kind == "backward" else following
        if to is None or to.microbatch not in places:
            continue
        place = places[to.microbatch]
        before = found[place]
        if to.kind in ("receive_hidden", "forward", "send_hidden"):
            found[place] = replace(before, forward=before.forward + seconds[at])
        else:
            found[place] = replace(before, backward=before.backward + seconds[at])
    return found


@dataclass(frozen=True, slots=True)
class _Listed:
    """The order of given lists."""

    lists: Lists
    places: dict[int, int]

    def chooser(self, stage: int, stages: int) -> Choose:
        """Forwards and backwards as they are listed."""
        del stages
        own = (each for each in self.lists[stage] if each.kind in ("forward", "backward"))
        return in_order([Action(each.kind, self.places[each.microbatch]) for each in own])  # type: ignore[arg-type]


def case_of(name: OrderName, stages: int, adapters: int, asked: OrderOptions) -> Case:
    """Plan and lower one case."""
    batches = {f"job{place}": _batches(f"job{place}", asked) for place in range(adapters)}
    found = arrange(name, batches, stages=stages, capacity=asked.tokens, limits=GREEDY)
    lists = lower(found.microbatches, stages, found.order)
    return Case(name, stages, adapters, found.microbatches, tuple(map(tuple, lists)))


def _batches(job: str, asked: OrderOptions) -> list[GlobalBatch]:
    count, lengths = asked.microbatches, (asked.tokens,) * asked.microbatches
    weight = 1.0 / (count * max(1, asked.tokens - 1))
    return [
        GlobalBatch(job, step, tuple(range(count)), (0,) * count, lengths, weight)
        for step in range(1, asked.steps + 1)
    ]


def with_collectives(case: Case) -> Case:
    """The same with a collective at every step: each stage steps before it takes anything that follows."""
    lists = []
    for own in case.lists:
        moved: list[Instruction] = []
        for each in own:
            after = moved and moved[-1].kind == "receive_hidden" and moved[-1].keys == each.keys
            moved.insert(len(moved) - (1 if each.kind == "step" and after else 0), each)
        lists.append(tuple(moved))
    return replace(case, lists=tuple(lists), collective=True)

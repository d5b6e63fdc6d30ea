"""A pipeline of a toy model in whole numbers: one weight of each job on each stage, so that equal is equal.

What a job's weights come to depends on every hidden state, gradient, sum and norm, and on the weights that
each forward saw. ``alone`` computes the same without any pipeline.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.plans import GlobalBatch, Microbatch
from plait.distributed.links import Links
from plait.distributed.stage_run import Messages, StageRun
from plait.planner.instructions import Instruction, Key
from plait.planner.packing import PackedBatches, first_fit_decreasing
from plait.planner.packing_exact import GREEDY
from plait.planner.windows import Windows
from plait.simulate.lowering import Lowering
from plait.simulate.orders import ORDERS, OrderName, arrange

MODULUS = 8191
CAPACITY = 12
RANDOM = 12  # random schedules over real links
Batches = dict[str, list[GlobalBatch]]


def _through(row: int, weight: int) -> int:
    return (3 * row + weight) % MODULUS


def _back(gradient: int, kept: int) -> int:
    return (5 * gradient + kept) % MODULUS


def _stepped(weight: int, gradient: int, squares: int, step: int) -> int:
    return (7 * weight + gradient + squares + step) % MODULUS


class ToyStage:
    """One stage, as :class:`~plait.distributed.stage_run.Stage`."""

    def __init__(self, number: int, stages: int) -> None:
        self.messages = Messages(1, torch.float64, torch.device("cpu"))
        self.number, self.last = number, number == stages - 1
        self.weights: dict[str, int] = {}
        self.gradients: dict[str, int] = {}
        self._kept: dict[int, list[int]] = {}

    def received(self) -> None:
        pass

    def sent(self) -> None:
        pass

    def forward(self, number: int, microbatch: Microbatch, entering: Tensor | None) -> Tensor | None:
        rows = _samples(microbatch) if entering is None else [int(row) for row in entering.flatten().tolist()]
        jobs = _jobs(microbatch)
        kept = [_through(row, self.weights.setdefault(job, 1)) for row, job in zip(rows, jobs, strict=True)]
        self._kept[number] = kept
        return None if self.last else torch.tensor(kept, dtype=torch.float64).view(-1, 1)

    def backward(self, number: int, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        kept = self._kept.pop(number)
        rows = kept if gradient is None else [int(row) for row in gradient.flatten().tolist()]
        for job, row, own in zip(_jobs(microbatch), rows, kept, strict=True):
            self.gradients[job] = (self.gradients.get(job, 0) + row * own) % MODULUS
        back = [_back(row, own) for row, own in zip(rows, kept, strict=True)]
        return torch.tensor(back, dtype=torch.float64).view(-1, 1) if self.number else None

    def squares(self, key: Key) -> float:
        return float(self.gradients.get(key[0], 0) ** 2)

    def step(self, keys: Sequence[Key], norms: Sequence[float]) -> None:
        for (job, step), norm in zip(keys, norms, strict=True):
            gradient = self.gradients.pop(job, 0)
            self.weights[job] = _stepped(self.weights.setdefault(job, 1), gradient, round(norm**2), step)


def _samples(microbatch: Microbatch) -> list[int]:
    return [
        sample
        for part in microbatch.segments
        for sample, length in zip(part.samples, part.lengths, strict=True)
        for _ in range(length)
    ]


def _jobs(microbatch: Microbatch) -> list[str]:
    return [part.job for part in microbatch.segments for _ in range(part.tokens)]


def alone(batches: Batches, stages: int) -> dict[str, list[int]]:
    """The weights of each job on each stage, trained by itself."""
    found = {}
    for job, own in batches.items():
        weights = [1] * stages
        for batch in own:
            gradients = [0] * stages
            for sample, length in zip(batch.samples, batch.lengths, strict=True):
                kept, row = [], sample
                for weight in weights:
                    row = _through(row, weight)
                    kept.append(row)
                for stage in reversed(range(stages)):
                    gradients[stage] = (gradients[stage] + length * row * kept[stage]) % MODULUS
                    row = _back(row, kept[stage])
            squares = sum(each**2 for each in gradients)
            pairs = zip(weights, gradients, strict=True)
            weights = [_stepped(weight, own, squares, batch.step) for weight, own in pairs]
        found[job] = weights
    return found


# ---- random schedules ---------------------------------------------------------------------------------


def random_jobs(draw: random.Random) -> Batches:
    """Jobs with global batches of uneven samples, which begin at different steps and end early or late."""
    found: Batches = {}
    for place in range(draw.randint(1, 4)):
        job, start = f"job{place}", draw.randint(0, 2)
        found[job] = []
        for step in range(start, start + draw.randint(1, 4)):
            lengths = tuple(draw.choice([1, 1, 2, 5, CAPACITY]) for _ in range(draw.randint(1, 3)))
            samples = tuple(draw.randrange(MODULUS) for _ in lengths)
            found[job].append(GlobalBatch(job, step, samples, (0,) * len(lengths), lengths, 1.0))
    return found


@dataclass
class Window:
    """One window of a schedule."""

    lists: list[list[Instruction]]
    microbatches: dict[int, Microbatch] = field(default_factory=dict)


def whole(name: OrderName, batches: Batches, stages: int) -> list[Window]:
    """All batches in one window."""
    found = arrange(name, batches, stages=stages, capacity=CAPACITY, limits=GREEDY)
    lists = Lowering(stages).window(found.microbatches, found.order)
    return [Window(lists, dict(enumerate(found.microbatches)))]


def in_windows(draw: random.Random, batches: Batches, stages: int) -> list[Window]:
    """A window for each step of the jobs that are in; they join at random, and the pipeline is rarely
    drained."""
    lowering, planned = Lowering(stages), Windows(stages, CAPACITY, packed)
    left = {job: deque(own) for job, own in batches.items()}
    joins = {job: draw.choice([0, 0, 1, 3]) for job in batches}
    windows: list[Window] = []
    for turn in range(100):
        live = [own for job, own in left.items() if own and joins[job] <= turn]
        drained = not any(left.values()) or (turn > 0 and draw.random() < 0.1)
        microbatches = planned.plan([own.popleft() for own in live if draw.random() < 0.9 or drained])
        drained = drained or not any(left.values())
        begin = lowering.next
        lists = lowering.window(microbatches, drained=drained)
        windows.append(Window(lists, dict(enumerate(microbatches, begin))))
        if drained:
            planned.drained()
        if not any(left.values()):
            return windows
    raise AssertionError("jobs never end")


def packed(batches: Sequence[GlobalBatch]) -> PackedBatches:
    bins = first_fit_decreasing([batch.lengths for batch in batches], capacity=CAPACITY)
    return PackedBatches(tuple(batches), tuple(map(tuple, bins)))


def random_schedule(seed: int) -> tuple[Batches, int, list[Window]]:
    """Jobs, stages and windows: half of the schedules are in many windows, the others of any order."""
    draw = random.Random(seed)
    batches, stages = random_jobs(draw), draw.randint(2, 4)
    if seed % 2:
        return batches, stages, in_windows(draw, batches, stages)
    return batches, stages, whole(ORDERS[seed // 2 % len(ORDERS)], batches, stages)


# ---- running them -------------------------------------------------------------------------------------


class Queues:
    """Links within one process: what is not there yet is not waited for."""

    def __init__(self, number: int, queues: dict[tuple[int, int], deque[Tensor]]) -> None:
        self._number, self._queues = number, queues
        self._sizes: dict[int, deque[int]] = {}

    def expect(self, process: int, sizes: Sequence[int]) -> None:
        self._sizes.setdefault(process, deque()).extend(sizes)

    def receive(self, process: int) -> Tensor:
        message = self._queues[process, self._number].popleft()
        assert message.nbytes == self._sizes[process].popleft()
        return message

    def send(self, process: int, message: Tensor) -> None:
        self._queues[self._number, process].append(message)


def run_interleaved(windows: Sequence[Window], stages: int, draw: random.Random) -> list[ToyStage]:
    """All stages in this process, taking turns at random: each goes on as far as it likes and can.

    Raises:
        AssertionError: none can go on.
    """
    queues: dict[tuple[int, int], deque[Tensor]] = {}
    for one, other in pairwise(range(stages)):
        queues[one, other], queues[other, one] = deque(), deque()
    toys = [ToyStage(number, stages) for number in range(stages)]
    runs = [StageRun(toy, Queues(number, queues), number) for number, toy in enumerate(toys)]
    todo = [_instructions(run, windows, number) for number, run in enumerate(runs)]
    heads = [next(each, None) for each in todo]
    while any(heads):
        moved = False
        for number in draw.sample(range(stages), stages):
            for _ in range(draw.choice([1, 3, 1000])):
                head = heads[number]
                if head is None or not _may(head, number, queues):
                    break
                runs[number].do(head)
                heads[number], moved = next(todo[number], None), True
        assert moved, f"deadlock: {heads}"
    assert not any(queues.values())
    return toys


def _instructions(run: StageRun, windows: Sequence[Window], number: int) -> Iterator[Instruction]:
    for window in windows:
        run.prepare(window.lists, window.microbatches)
        yield from window.lists[number]


def _may(each: Instruction, number: int, queues: Mapping[tuple[int, int], deque[Tensor]]) -> bool:
    if each.kind == "receive_hidden":
        return bool(queues[number - 1, number])
    return each.kind != "receive_gradient" or bool(queues[number + 1, number])


def run_in_processes(number: int, processes: int, folder: str, make: Callable[[], list[Plan]]) -> None:
    """One stage of each plan, over gloo between processes; its weights go into a file."""
    store = dist.FileStore(str(Path(folder) / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=number, world_size=processes)
    links, ended = Links(number, torch.device("cpu")), []
    for stages, windows in make():
        if number < stages:
            toy = ToyStage(number, stages)
            run = StageRun(toy, links, number)
            for window in windows:
                run.run(window.lists, window.microbatches)
            links.finish()
            ended.append(toy.weights)
    torch.save(ended, Path(folder) / f"weights-{number}")
    dist.barrier()
    dist.destroy_process_group()


Plan = tuple[int, list[Window]]  # stages and windows


def uneven(count: int = 40) -> Batches:
    """One long microbatch, then many short ones, which are all sent on before that one is back."""
    lengths = (CAPACITY, *[1] * (count - 1))
    return {
        f"job{place}": [GlobalBatch(f"job{place}", 0, (place,), (0,), (length,), 1.0)]
        for place, length in enumerate(lengths)
    }


def plans_over_processes() -> list[Plan]:
    """What is run over real links: an order that sends much before it receives, then some random ones."""
    plans = [(stages, whole("mlora", uneven(), stages)) for stages in (2, 3)]
    return [*plans, *(random_schedule(seed)[1:] for seed in range(RANDOM))]

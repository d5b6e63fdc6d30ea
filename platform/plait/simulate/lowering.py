"""From microbatches to one list of instructions for each stage of a pipeline, one window after another.

A seam: planning, benchmarks and the processes of a pipeline make the same lists from the same microbatches.
A window that begins and ends drained may have any order; that comes from a simulation, and whatever can be
simulated, stages can run. Other windows have one forward, one backward: what one leaves in flight, the next
one continues, so that nothing waits between them. Lists are checked before they are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from plait.core.plans import Microbatch
from plait.cost.time import StageTime
from plait.planner.instructions import NONE, Instruction, Key, Replay, raise_if
from plait.simulate.events import Action, Order, Pipeline, Work, simulate

StageSeconds = Sequence[Sequence[StageTime]]  # by stage: those of each microbatch


def lower(
    microbatches: Sequence[Microbatch], stages: int, order: Order, seconds: StageSeconds | None = None
) -> list[list[Instruction]]:
    """The lists of a single window, as :meth:`Lowering.window`."""
    return Lowering(stages).window(microbatches, order, seconds=seconds)


class Lowering:
    """Makes the lists of windows that follow each other; a job steps as soon as its own batch is back.

    Attributes:
        next: the number of the next microbatch; the first was 0.
    """

    def __init__(self, stages: int) -> None:
        self.next = 0
        self._stages = [_Stage(stage, stages) for stage in range(stages)]
        self._flying = [deque[int]() for _ in range(stages)]  # before their backward, no-ops included
        self._filled: dict[int, tuple[Key, ...]] = {}  # not yet back on the first stage
        self._replay = Replay(stages)

    @property
    def drained(self) -> bool:
        """Whether nothing is in flight."""
        return not any(self._flying)

    def forget(self, job: str) -> None:
        """A job has left: one of its name may begin at any step."""
        self._replay.forget(job)

    def window(
        self,
        microbatches: Sequence[Microbatch],
        order: Order | None = None,
        *,
        drained: bool = True,
        seconds: StageSeconds | None = None,
    ) -> list[list[Instruction]]:
        """The list of each stage; no-ops leave nothing.

        Args:
            order: of a window that begins and ends drained; None: one forward, one backward.
            drained: whether nothing is in flight at its end.
            seconds: by which an order decides that takes what is ready; None: by tokens.

        Raises:
            SimulationError: the order waits for ever.
            ScheduleError: the lists do not train the microbatches on current weights.
        """
        begin, self.next = self.next, self.next + len(microbatches)
        numbered = dict(enumerate(microbatches, begin))
        filled = {number: _keys(each) for number, each in numbered.items() if each.segments}
        if order is None or not (drained and self.drained):
            actions = [self._one_f_one_b(stage, numbered, drained=drained) for stage in self._stages]
            complete = [_complete(filled, filled)] * len(self._stages)
        else:
            actions = _simulated(microbatches, len(self._stages), order, seconds, begin)
            complete = [_complete(_backwards(own), filled) for own in actions]
        self._filled |= filled
        lists = self._listed(actions, complete, drained=drained)
        for number in _backwards(actions[0]):
            self._filled.pop(number, None)
        raise_if(self._replay.add(lists, numbered, drained=drained))
        return lists

    def _one_f_one_b(self, stage: _Stage, numbers: Iterable[int], *, drained: bool) -> list[Action]:
        """A backward as soon as there are as many in flight as stages from here on."""
        flying, found = self._flying[stage.number], list[Action]()
        for number in numbers:
            found.append(Action("forward", number))
            flying.append(number)
            if len(flying) == len(self._stages) - stage.number:
                found.append(Action("backward", flying.popleft()))
        while drained and flying:
            found.append(Action("backward", flying.popleft()))
        return found

    def _listed(
        self,
        actions: Sequence[Sequence[Action]],
        complete: Sequence[Mapping[int, tuple[Key, ...]]],
        *,
        drained: bool,
    ) -> list[list[Instruction]]:
        for stage, ends in zip(self._stages, complete, strict=True):
            stage.complete |= ends
        for stage, below, done in zip(self._stages, self._stages[1:], actions[1:], strict=False):
            numbers = (number for number in _backwards(done) if number in self._filled)
            stage.gradients += (
                Instruction("receive_gradient", number, below.complete.get(number, ())) for number in numbers
            )
        lists: list[list[Instruction]] = []
        for stage, own in zip(self._stages, actions, strict=True):
            if lists:
                sent = (each for each in lists[-1] if each.kind == "send_hidden")
                stage.hidden += (each._replace(kind="receive_hidden") for each in sent)
            lists.append(stage.listed([each for each in own if each.work in self._filled], drained=drained))
        return lists


def _keys(microbatch: Microbatch) -> tuple[Key, ...]:
    return tuple((each.job, each.step) for each in microbatch.segments)


def _backwards(actions: Iterable[Action]) -> list[int]:
    return [each.work for each in actions if each.kind == "backward"]


def _complete(order: Iterable[int], filled: Mapping[int, tuple[Key, ...]]) -> dict[int, tuple[Key, ...]]:
    """By microbatch: the global batches that are complete after its backward, for backwards in this order."""
    last = {key: number for number in order for key in filled.get(number, ())}
    found: dict[int, tuple[Key, ...]] = {}
    for key, number in last.items():
        found[number] = (*found.get(number, ()), key)
    return found


def _simulated(
    microbatches: Sequence[Microbatch],
    stages: int,
    order: Order,
    seconds: StageSeconds | None,
    begin: int,
) -> list[list[Action]]:
    """What each stage does, in the order of a simulation."""
    works = [Work(_keys(each), tokens=each.tokens) for each in microbatches]
    by_tokens = [StageTime(each.tokens, 2 * each.tokens) for each in microbatches]
    run = simulate({0: Pipeline(works, seconds or [by_tokens] * stages, order)})
    actions: list[list[Action]] = [[] for _ in range(stages)]
    for span in run.spans:
        actions[span.stage].append(Action(span.kind, begin + span.work))
    return actions


class _Stage:
    """Makes the lists of one stage, one after another.

    Attributes:
        gradients: what the stage after it will have sent and this one has not received, in that order.
        hidden: the same of the stage before it.
        complete: by microbatch, the global batches that are complete after its backward.
        totals: stepped here, not yet sent on.
    """

    def __init__(self, number: int, stages: int) -> None:
        self.number = number
        self.first, self.last = number == 0, number == stages - 1
        self.gradients: deque[Instruction] = deque()
        self.hidden: deque[Instruction] = deque()
        self.complete: dict[int, tuple[Key, ...]] = {}
        self.totals: tuple[Key, ...] = ()
        self.list: list[Instruction] = []

    def listed(self, actions: Iterable[Action], *, drained: bool) -> list[Instruction]:
        """The next list, for these forwards and backwards."""
        self.list = []
        for each in actions:
            if each.kind == "forward":
                self._forward(each.work)
            else:
                self._backward(each.work)
        if drained:
            self._receive(NONE)
            if self.totals and not self.last:
                self._send_hidden(NONE)
            self.totals = ()
        return self.list

    def _forward(self, work: int) -> None:
        self._receive(work)
        self.list.append(Instruction("forward", work))
        if not self.last:
            self._send_hidden(work)

    def _send_hidden(self, work: int) -> None:
        self.list.append(Instruction("send_hidden", work, self.totals))
        self.totals = ()

    def _receive(self, work: int) -> None:
        """Take hidden states up to those of ``work``, as they were sent, and step by the totals with them."""
        if all(each.microbatch != work for each in self.hidden):
            return
        while True:
            found = self.hidden.popleft()
            self.list.append(found)
            if found.keys:
                self._step(found.keys)
            if found.microbatch == work:
                return

    def _backward(self, work: int) -> None:
        while any(each.microbatch == work for each in self.gradients):
            self.list.append(self.gradients.popleft())
        complete = self.complete.pop(work, ())
        self.list.append(Instruction("backward", work))
        if not self.first:
            self.list.append(Instruction("send_gradient", work, complete))
        elif complete:
            self._step(complete)

    def _step(self, keys: tuple[Key, ...]) -> None:
        self.list.append(Instruction("step", keys=keys))
        self.totals += () if self.last else keys

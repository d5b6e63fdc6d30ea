"""From an order of microbatches to one list of instructions for each stage of a pipeline.

A seam: planning, benchmarks and the processes of a pipeline make the same lists from the same microbatches.
The order comes from a simulation, so whatever it can run, stages can. Lists are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.plans import Microbatch
from plait.cost.time import StageTime
from plait.planner.instructions import NONE, Instruction, Key, check_instructions
from plait.simulate.events import Action, Order, Pipeline, Work, simulate


def lower(
    microbatches: Sequence[Microbatch],
    stages: int,
    order: Order,
    seconds: Sequence[Sequence[StageTime]] | None = None,
) -> list[list[Instruction]]:
    """The list of each stage; a job steps as soon as its own batch is back. No-ops leave nothing.

    Args:
        seconds: of each microbatch on each stage, by which an order decides that takes what is ready; None:
            by tokens.

    Raises:
        SimulationError: the order waits for ever.
        ScheduleError: the lists do not train the microbatches on current weights.
    """
    works = [Work(tuple((s.job, s.step) for s in each.segments), tokens=each.tokens) for each in microbatches]
    by_tokens = [StageTime(each.tokens, 2 * each.tokens) for each in microbatches]
    run = simulate({0: Pipeline(works, seconds or [by_tokens] * stages, order)})
    actions: list[list[Action]] = [[] for _ in range(stages)]
    for span in run.spans:
        if works[span.work].parts:
            actions[span.stage].append(Action(span.kind, span.work))
    lists: list[list[Instruction]] = []
    for stage in range(stages):
        below = actions[stage + 1] if stage + 1 < stages else []
        above = [each for each in lists[-1] if each.kind == "send_hidden"] if lists else []
        lists.append(_Stage(stage, stages, works, below, above).listed(actions[stage]))
    check_instructions(lists, microbatches)
    return lists


def _last_backwards(actions: Sequence[Action], works: Sequence[Work]) -> dict[int, tuple[Key, ...]]:
    """By microbatch: the global batches that are complete after its backward."""
    last: dict[Key, int] = {}
    for each in actions:
        if each.kind == "backward":
            last |= dict.fromkeys(works[each.work].parts, each.work)
    found: dict[int, tuple[Key, ...]] = {}
    for key, work in last.items():
        found[work] = (*found.get(work, ()), key)
    return found


class _Stage:
    """Makes the list of one stage.

    Args:
        below: the forwards and backwards of the next stage.
        above: what the stage before sends, in its order.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        works: Sequence[Work],
        below: Sequence[Action],
        above: Sequence[Instruction],
    ) -> None:
        self.first, self.last = stage == 0, stage == stages - 1
        self.works = works
        sums = _last_backwards(below, works)
        self.gradients = [
            Instruction("receive_gradient", each.work, sums.get(each.work, ()))
            for each in below
            if each.kind == "backward"
        ]
        self.hidden = [each._replace(kind="receive_hidden") for each in above]
        self.totals: tuple[Key, ...] = ()  # stepped here, not yet sent on
        self.list: list[Instruction] = []

    def listed(self, actions: Sequence[Action]) -> list[Instruction]:
        """The whole list, for these forwards and backwards."""
        complete = _last_backwards(actions, self.works)
        for each in actions:
            if each.kind == "forward":
                self._forward(each.work)
            else:
                self._backward(each.work, complete.get(each.work, ()))
        self._receive(NONE)
        if self.totals and not self.last:
            self._send_hidden(NONE)
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
            found = self.hidden.pop(0)
            self.list.append(found)
            if found.keys:
                self._step(found.keys)
            if found.microbatch == work:
                return

    def _backward(self, work: int, complete: tuple[Key, ...]) -> None:
        while any(each.microbatch == work for each in self.gradients):
            self.list.append(self.gradients.pop(0))
        self.list.append(Instruction("backward", work))
        if not self.first:
            self.list.append(Instruction("send_gradient", work, complete))
        elif complete:
            self._step(complete)

    def _step(self, keys: tuple[Key, ...]) -> None:
        self.list.append(Instruction("step", keys=keys))
        self.totals += keys

"""What each stage of a pipeline does: a list of instructions, and a check of all lists before they run.

A seam: this replay stands between what makes the lists and what carries them out. It knows
nothing of orders. Links are queues: a message is received in the order in which it was sent.

The norm by which a job's gradient is clipped is one over all stages. So that no stage waits for it, it
travels with what is sent anyway: the sum of squares goes up with a gradient, adding up from stage to stage,
and the total comes down with hidden states. A stage steps a job when the total is there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from plait.core.plans import Microbatch
from plait.planner.verify import ScheduleError

Kind = Literal[
    "receive_hidden", "forward", "send_hidden", "receive_gradient", "backward", "send_gradient", "step"
]
Key = tuple[str, int]  # a job and one of its global batches
NONE = -1  # in place of a microbatch: a message with totals alone, or a step


class Instruction(NamedTuple):
    """One thing that a stage does.

    Attributes:
        microbatch: its place among the microbatches; NONE if there is none.
        keys: of a gradient: whose sums of squares travel with it; of hidden states: whose totals; of a step:
            what is stepped.
    """

    kind: Kind
    microbatch: int = NONE
    keys: tuple[Key, ...] = ()


Lists = Sequence[Sequence[Instruction]]  # by stage


def raise_if(faults: Sequence[str]) -> None:
    """Raise if there are faults.

    Raises:
        ScheduleError: with the first of them.
    """
    if faults:
        raise ScheduleError(
            "\n".join(faults[:10]),
            "Stages send what is received, step when a batch is complete, and never wait for each other.",
        )


@dataclass
class _Stage:
    left: deque[Instruction] = field(default_factory=deque)
    forwards: set[int] = field(default_factory=set)  # still to run
    backwards: set[int] = field(default_factory=set)
    due: set[Key] = field(default_factory=set)  # still to be stepped
    hidden: set[int] = field(default_factory=set)  # received
    gradient: set[int] = field(default_factory=set)
    seen: dict[int, dict[str, int]] = field(default_factory=dict)  # by forward: the steps of each of its jobs
    gradients: Counter[Key] = field(default_factory=Counter)  # segments added up, not stepped
    sums: set[Key] = field(default_factory=set)  # of the stages after it
    totals: set[Key] = field(default_factory=set)  # from the stage before it
    stepped: set[Key] = field(default_factory=set)  # their totals are not yet sent on
    steps: Counter[str] = field(default_factory=Counter)
    down: deque[Instruction] = field(default_factory=deque)  # sent to it
    up: deque[Instruction] = field(default_factory=deque)


class Replay:
    """Carries out lists in words alone; those of one window follow those of the window before."""

    def __init__(self, stages: int) -> None:
        self.microbatches: dict[int, Microbatch] = {}  # those that are not back on the first stage
        self.stages = [_Stage() for _ in range(stages)]
        self.due: Counter[Key] = Counter()  # segments of each global batch
        self.first: dict[str, int] = {}
        self.faults: list[str] = []

    def forget(self, job: str) -> None:
        """A job has left: one of its name may begin at any step."""
        self.first.pop(job, None)
        for stage in self.stages:
            stage.steps.pop(job, None)

    def add(self, lists: Lists, microbatches: Mapping[int, Microbatch], *, drained: bool = True) -> list[str]:
        """What is wrong with the lists of the next window, in words; it ends at the first fault of what it
        runs.

        Args:
            microbatches: the window's, by number.
            drained: whether nothing may be left at its end; if not, only forwards may not.
        """
        filled = {number: each for number, each in microbatches.items() if each.segments}
        parts = [part for each in filled.values() for part in each.segments]
        self.microbatches |= filled
        self.due.update((part.job, part.step) for part in parts)
        for part in parts:
            self.first[part.job] = min(part.step, self.first.get(part.job, part.step))
        for stage, own in zip(self.stages, lists, strict=True):
            stage.left.extend(own)
            stage.forwards |= filled.keys()
            stage.backwards |= filled.keys()
            stage.due |= {(part.job, part.step) for part in parts}
        while not self.faults and any(self._advance(place) for place in range(len(self.stages))):
            pass
        if not self.faults:
            self._note_rest(drained=drained)
        return self.faults

    def _note_rest(self, *, drained: bool) -> None:
        for place, stage in enumerate(self.stages):
            if stage.left:
                self.faults.append(f"stage {place} waits for ever to {_said(stage.left[0])}")
            if stage.forwards or (drained and stage.backwards):
                self.faults.append(f"stage {place}: not one forward and one backward of every microbatch")
            if drained and stage.due:
                self.faults.append(f"stage {place}: not one step of every global batch")
            for message in (*stage.down, *stage.up) if drained else ():
                self.faults.append(f"stage {place} never takes what it was sent: {_said(message)}")
        back = self.stages[0].backwards
        self.microbatches = {number: each for number, each in self.microbatches.items() if number in back}

    def _advance(self, place: int) -> bool:
        stage, moved = self.stages[place], False
        run: dict[Kind, Callable[[int, _Stage, Instruction], None]] = {
            "receive_hidden": self._receive,
            "receive_gradient": self._receive,
            "send_hidden": self._send_hidden,
            "send_gradient": self._send_gradient,
            "forward": self._forward,
            "backward": self._backward,
            "step": self._step,
        }
        while stage.left and not self.faults and self._arrived(stage, stage.left[0]):
            each = stage.left.popleft()
            run[each.kind](place, stage, each)
            moved = True
        return moved

    def _arrived(self, stage: _Stage, each: Instruction) -> bool:
        """Whether what it needs from another stage was sent."""
        if each.kind == "receive_hidden":
            return bool(stage.down)
        return each.kind != "receive_gradient" or bool(stage.up)

    def _receive(self, place: int, stage: _Stage, each: Instruction) -> None:
        down = each.kind == "receive_hidden"
        sent = (stage.down if down else stage.up).popleft()
        if sent[1:] != each[1:]:
            self._fault(place, each, f"where the other stage will {_said(sent)}")
        (stage.hidden if down else stage.gradient).add(each.microbatch)
        (stage.totals if down else stage.sums).update(each.keys)

    def _send_hidden(self, place: int, stage: _Stage, each: Instruction) -> None:
        if each.microbatch != NONE and each.microbatch not in stage.seen:
            self._fault(place, each, "before its forward")
        if place == len(self.stages) - 1 or not set(each.keys) <= stage.stepped:
            self._fault(place, each, "without a stage after it, or with a total that it has not")
        else:
            stage.stepped -= set(each.keys)
            self.stages[place + 1].down.append(each)

    def _send_gradient(self, place: int, stage: _Stage, each: Instruction) -> None:
        last = place == len(self.stages) - 1
        incomplete = [key for key in each.keys if not self._complete(stage, key)]
        if place == 0 or incomplete or not (last or set(each.keys) <= stage.sums):
            self._fault(place, each, "without a stage before it, or with a sum that is not complete")
        elif each.microbatch in stage.seen:  # its backward takes it out
            self._fault(place, each, "before its backward")
        else:
            self.stages[place - 1].up.append(each)

    def _complete(self, stage: _Stage, key: Key) -> bool:
        """Whether the stage has all gradients of this batch and no others of its job."""
        have = {own: count for own, count in stage.gradients.items() if own[0] == key[0] and count}
        return have == {key: self.due[key]}

    def _forward(self, place: int, stage: _Stage, each: Instruction) -> None:
        if place and each.microbatch not in stage.hidden:
            self._fault(place, each, "before its hidden states are there")
        if each.microbatch not in stage.forwards:
            self._fault(place, each, "which is not due")
            return
        stage.forwards.discard(each.microbatch)
        stage.hidden.discard(each.microbatch)
        parts = self.microbatches[each.microbatch].segments
        stage.seen[each.microbatch] = {part.job: stage.steps[part.job] for part in parts}
        for part in parts:
            if stage.steps[part.job] != part.step - self.first[part.job]:
                self._fault(place, each, f"on weights of {part.job} after {stage.steps[part.job]} steps")

    def _backward(self, place: int, stage: _Stage, each: Instruction) -> None:
        if place < len(self.stages) - 1 and each.microbatch not in stage.gradient:
            self._fault(place, each, "before its gradient is there")
        if each.microbatch not in stage.backwards:
            self._fault(place, each, "which is not due")
            return
        stage.backwards.discard(each.microbatch)
        stage.gradient.discard(each.microbatch)
        seen = stage.seen.pop(each.microbatch, None)
        for part in self.microbatches[each.microbatch].segments:
            if seen is None or seen[part.job] != stage.steps[part.job]:
                self._fault(place, each, f"on other weights of {part.job} than its forward")
            stage.gradients[part.job, part.step] += 1

    def _step(self, place: int, stage: _Stage, each: Instruction) -> None:
        single = len(self.stages) == 1
        for key in each.keys:
            known = single or key in (stage.totals if place else stage.sums)
            if key not in stage.due or not known or not self._complete(stage, key):
                self._fault(place, each, "without its whole norm, or with other gradients than its batch's")
            for own in (stage.gradients, stage.due, stage.sums, stage.totals):
                _drop(own, key)
            if place < len(self.stages) - 1:
                stage.stepped.add(key)
            elif all(key not in other.due for other in self.stages):
                del self.due[key]
            stage.steps[key[0]] += 1

    def _fault(self, place: int, each: Instruction, what: str) -> None:
        self.faults.append(f"stage {place}: {_said(each)} {what}")


def _drop(own: Counter[Key] | set[Key], key: Key) -> None:
    if isinstance(own, set):
        own.discard(key)
    else:
        own.pop(key, None)


def _said(each: Instruction) -> str:
    number = "" if each.microbatch == NONE else f" of microbatch {each.microbatch}"
    keys = ", ".join(f"{job} step {step}" for job, step in each.keys)
    return f"{each.kind.replace('_', ' ')}{number}{f' ({keys})' if keys else ''}"

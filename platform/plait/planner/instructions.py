"""What each stage of a pipeline does: a list of instructions, and a check of all lists before they run.

A seam: this replay stands between what makes the lists and what carries them out. It knows
nothing of orders. Links are queues: a message is received in the order in which it was sent.

The norm by which a job's gradient is clipped is one over all stages. So that no stage waits for it, it
travels with what is sent anyway: the sum of squares goes up with a gradient, adding up from stage to stage,
and the total comes down with hidden states. A stage steps a job when the total is there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
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


def check_instructions(lists: Lists, microbatches: Sequence[Microbatch]) -> None:
    """Raise if the lists do not train these microbatches, on current weights, to their end.

    Raises:
        ScheduleError: with the faults that were found.
    """
    if faults := wrong_instructions(lists, microbatches):
        raise ScheduleError(
            "\n".join(faults[:10]),
            "Stages send what is received, step when a batch is complete, and never wait for each other.",
        )


def wrong_instructions(lists: Lists, microbatches: Sequence[Microbatch]) -> list[str]:
    """What is wrong with the lists, in words; the replay ends at the first fault of what it runs."""
    return _counted(lists, microbatches) or _Replay(lists, microbatches).run()


def _counted(lists: Lists, microbatches: Sequence[Microbatch]) -> list[str]:
    """Violations of: on each stage, one forward and one backward of every microbatch, one step of a batch."""
    filled = Counter(place for place, each in enumerate(microbatches) if each.segments)
    keys = Counter({(part.job, part.step) for each in microbatches for part in each.segments})
    faults = []
    for stage, own in enumerate(lists):
        faults += [
            f"stage {stage}: not one {kind} of every microbatch"
            for kind in ("forward", "backward")
            if Counter(each.microbatch for each in own if each.kind == kind) != filled
        ]
        if Counter(key for each in own if each.kind == "step" for key in each.keys) != keys:
            faults.append(f"stage {stage}: not one step of every global batch")
    return faults


@dataclass
class _Stage:
    left: deque[Instruction]
    hidden: set[int] = field(default_factory=set)  # received
    gradient: set[int] = field(default_factory=set)
    seen: dict[int, dict[str, int]] = field(default_factory=dict)  # by forward: the steps of each of its jobs
    gradients: Counter[Key] = field(default_factory=Counter)  # segments added up, not stepped
    sums: set[Key] = field(default_factory=set)  # of the stages after it
    totals: set[Key] = field(default_factory=set)  # from the stage before it
    stepped: set[Key] = field(default_factory=set)
    steps: Counter[str] = field(default_factory=Counter)
    down: deque[Instruction] = field(default_factory=deque)  # sent to it
    up: deque[Instruction] = field(default_factory=deque)


class _Replay:
    def __init__(self, lists: Lists, microbatches: Sequence[Microbatch]) -> None:
        self.microbatches = microbatches
        self.stages = [_Stage(deque(own)) for own in lists]
        self.due: Counter[Key] = Counter(
            (part.job, part.step) for each in microbatches for part in each.segments
        )
        self.first: dict[str, int] = {}
        for job, step in self.due:
            self.first[job] = min(step, self.first.get(job, step))
        self.faults: list[str] = []

    def run(self) -> list[str]:
        """Replay until every list is empty, a fault is found, or nothing can proceed."""
        while not self.faults and any(self._advance(place) for place in range(len(self.stages))):
            pass
        if self.faults:
            return self.faults
        for place, stage in enumerate(self.stages):
            if stage.left:
                self.faults.append(f"stage {place} waits for ever to {_said(stage.left[0])}")
            for message in (*stage.down, *stage.up):
                self.faults.append(f"stage {place} never takes what it was sent: {_said(message)}")
        return self.faults

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
        parts = self.microbatches[each.microbatch].segments
        stage.seen[each.microbatch] = {part.job: stage.steps[part.job] for part in parts}
        for part in parts:
            if stage.steps[part.job] != part.step - self.first[part.job]:
                self._fault(place, each, f"on weights of {part.job} after {stage.steps[part.job]} steps")

    def _backward(self, place: int, stage: _Stage, each: Instruction) -> None:
        if place < len(self.stages) - 1 and each.microbatch not in stage.gradient:
            self._fault(place, each, "before its gradient is there")
        seen = stage.seen.pop(each.microbatch, None)
        for part in self.microbatches[each.microbatch].segments:
            if seen is None or seen[part.job] != stage.steps[part.job]:
                self._fault(place, each, f"on other weights of {part.job} than its forward")
            stage.gradients[part.job, part.step] += 1

    def _step(self, place: int, stage: _Stage, each: Instruction) -> None:
        single = len(self.stages) == 1
        for key in each.keys:
            known = single or key in (stage.totals if place else stage.sums)
            if not known or not self._complete(stage, key):
                self._fault(place, each, "without its whole norm, or with other gradients than its batch's")
            del stage.gradients[key]
            stage.stepped.add(key)
            stage.steps[key[0]] += 1

    def _fault(self, place: int, each: Instruction, what: str) -> None:
        self.faults.append(f"stage {place}: {_said(each)} {what}")


def _said(each: Instruction) -> str:
    number = "" if each.microbatch == NONE else f" of microbatch {each.microbatch}"
    keys = ", ".join(f"{job} step {step}" for job, step in each.keys)
    return f"{each.kind.replace('_', ' ')}{number}{f' ({keys})' if keys else ''}"

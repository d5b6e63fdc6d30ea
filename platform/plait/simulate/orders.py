"""How a stage chooses what to run next: by a fixed list, or backward first among what is ready."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """The forward or backward of the microbatch at this place of the schedule."""

    kind: Kind
    work: int


class Chooser(Protocol):
    """The choice of one stage; keeps its own place."""

    def choose(self, ready: Mapping[Kind, Collection[int]], in_flight: int) -> Action | None:
        """What to start now, which then counts as started; None waits.

        Args:
            ready: microbatches whose inputs are there.
            in_flight: microbatches of which this stage holds activations.
        """


class Order(Protocol):
    """The rule by which all stages choose."""

    def chooser(self, stage: int, stages: int) -> Chooser:
        """The chooser of one stage."""


class _FromList:
    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions, self.place = actions, 0

    def choose(self, ready: Mapping[Kind, Collection[int]], in_flight: int) -> Action | None:
        del in_flight  # the list bounds it
        if self.place == len(self.actions):
            return None
        action = self.actions[self.place]
        if action.work not in ready[action.kind]:
            return None
        self.place += 1
        return action


class _BackwardFirst:
    def __init__(self, most_in_flight: int | None) -> None:
        self.most = most_in_flight

    def choose(self, ready: Mapping[Kind, Collection[int]], in_flight: int) -> Action | None:
        if ready["backward"]:
            return Action("backward", min(ready["backward"]))
        if ready["forward"] and (self.most is None or in_flight < self.most):
            return Action("forward", min(ready["forward"]))
        return None


@dataclass(frozen=True, slots=True)
class GPipe:
    """All forwards of a global batch, then all its backwards.

    Attributes:
        batches: microbatches of each global batch, in order.
    """

    batches: Sequence[int]

    def chooser(self, stage: int, stages: int) -> Chooser:
        """The same list on every stage."""
        del stage, stages
        actions, begin = [], 0
        for count in self.batches:
            places = range(begin, begin + count)
            actions += [Action("forward", place) for place in places]
            actions += [Action("backward", place) for place in places]
            begin += count
        return _FromList(actions)


@dataclass(frozen=True, slots=True)
class OneFOneB:
    """One forward, one backward; at most stages − s microbatches in flight on stage s.

    Attributes:
        batches: microbatches of each global batch, the pipeline being drained after each; one entry
            for all microbatches lets it run on.
    """

    batches: Sequence[int]

    def chooser(self, stage: int, stages: int) -> Chooser:
        """The list of one stage."""
        ahead, actions, begin = stages - stage, list[Action](), 0
        for count in self.batches:
            for place in range(count + ahead):
                if ahead <= place:
                    actions.append(Action("backward", begin + place - ahead))
                if place < count:
                    actions.append(Action("forward", begin + place))
            begin += count
        return _FromList(actions)


@dataclass(frozen=True, slots=True)
class BackwardFirst:
    """LoRAPP (mLoRA §3.2): whatever is ready, backward before forward, earlier before later.

    Attributes:
        limited: hold at most stages − s microbatches on stage s, as 1F1B does.
    """

    limited: bool = False

    def chooser(self, stage: int, stages: int) -> Chooser:
        """The rule, with the stage's limit."""
        return _BackwardFirst(stages - stage if self.limited else None)

"""An independent check of a schedule: contents, then a replay in 1F1B order.

It shares no code with the packer. The replay runs every stage's list of forwards, backwards and steps as a
pipeline would, with the messages between stages and the reduction of gradients between replicas. It checks
that a forward sees the weights after the job's previous step, a backward the same weights as its forward, and
a step all gradients of its global batch and no others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from plait.core.errors import PlaitError, choices
from plait.core.plans import GlobalBatch, Microbatch, OptimiserStep, Segment

Entry = Microbatch | OptimiserStep
Where = tuple[int, int]  # replica and stage


class ScheduleError(PlaitError, RuntimeError):
    """A schedule breaks a rule."""


def verify(
    schedule: Sequence[Entry],
    batches: Iterable[GlobalBatch],
    *,
    stages: Mapping[int, int],
    capacity: int | Mapping[int, int],
    tile: int = 1,
) -> None:
    """Check that ``schedule`` trains exactly ``batches``, in order, with current weights.

    Args:
        batches: every job's global batches; each job's steps ascend by 1.
        capacity: most padded tokens of a microbatch, for all replicas or for each.

    Raises:
        ScheduleError: it does not; the message has all violations found.
    """
    _raise_if(violations(schedule, batches, stages=stages, capacity=capacity, tile=tile))


def _raise_if(faults: Sequence[str]) -> None:
    if faults:
        more = f"\n... and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise ScheduleError(
            "\n".join(faults[:10]) + more,
            "A schedule trains every sample once, in order, on current weights.",
        )


def verify_contents(
    microbatches: Sequence[Microbatch], batches: Sequence[GlobalBatch], capacities: Mapping[int, int]
) -> None:
    """Raise if the microbatches of all replicas do not hold every sample of ``batches`` exactly once.

    Raises:
        ScheduleError: with all violations found.
    """
    faults = _wrong_sizes(microbatches, capacities, 1) + _wrong_samples(microbatches, batches)
    _raise_if(faults)


def violations(
    schedule: Sequence[Entry],
    batches: Iterable[GlobalBatch],
    *,
    stages: Mapping[int, int],
    capacity: int | Mapping[int, int],
    tile: int = 1,
) -> list[str]:
    """Everything that is wrong with ``schedule``, in words; empty if nothing is."""
    wanted = list(batches)
    faults = _wrong_places(schedule, stages)
    if faults:
        return faults  # the replay needs to know where each microbatch runs
    faults += _wrong_sizes(schedule, capacity, tile)
    faults += _wrong_samples(schedule, wanted)
    faults += _wrong_steps(schedule, wanted)
    return faults or _Replay(schedule, stages).run()


def _wrong_places(schedule: Sequence[Entry], stages: Mapping[int, int]) -> list[str]:
    faults, expected = [], Counter[int]()
    for entry in schedule:
        if isinstance(entry, Microbatch):
            if entry.replica not in stages:
                faults.append(f"microbatch on replica {entry.replica}; there are {choices(set(stages))}")
            elif entry.index != expected[entry.replica]:
                due = expected[entry.replica]
                faults.append(f"replica {entry.replica}: microbatch {entry.index} where {due} is due")
            expected[entry.replica] += 1
    return faults


def _wrong_sizes(schedule: Sequence[Entry], capacity: int | Mapping[int, int], tile: int) -> list[str]:
    faults = []
    for entry in schedule:
        if not isinstance(entry, Microbatch):
            continue
        where = f"microbatch {entry.index} of replica {entry.replica}"
        size = 0
        for segment in entry.segments:
            tokens = sum(segment.lengths)
            size += tokens + (tile - tokens % tile) % tile
            if not segment.samples or not len(segment.samples) == len(segment.draws) == len(segment.lengths):
                faults.append(
                    f"{where}: a segment of {segment.job} with no samples or lists of unequal length"
                )
        most = capacity if isinstance(capacity, int) else capacity[entry.replica]
        if size > most:
            faults.append(f"{where}: {size} padded tokens, capacity {most}")
        owners = Counter((segment.job, segment.step) for segment in entry.segments)
        faults += [f"{where}: {job} step {step} twice" for (job, step), n in owners.items() if n > 1]
    return faults


def _wrong_samples(schedule: Sequence[Entry], batches: Sequence[GlobalBatch]) -> list[str]:
    """Violations of: every sample of every global batch once, with its own length, draw, weight and split."""
    have = Counter(
        row for entry in schedule if isinstance(entry, Microbatch) for s in entry.segments for row in _rows(s)
    )
    want = Counter(row for batch in batches for row in _rows(batch))
    return [f"missing: {row}" for row in (want - have)] + [f"not asked for: {row}" for row in (have - want)]


def _rows(part: GlobalBatch | Segment) -> list[tuple[object, ...]]:
    return [
        (part.job, part.step, part.split, part.loss_weight, *row)
        for row in zip(part.samples, part.draws, part.lengths, strict=False)
    ]


def _wrong_steps(schedule: Sequence[Entry], batches: Sequence[GlobalBatch]) -> list[str]:
    """Violations of: one step for each global batch, in order for each job."""
    want: dict[str, list[int]] = {}
    for batch in batches:
        want.setdefault(batch.job, []).append(batch.step)
    have: dict[str, list[int]] = {}
    for entry in schedule:
        if isinstance(entry, OptimiserStep):
            have.setdefault(entry.job, []).append(entry.step)
    return [
        f"{job}: steps {have.get(job, [])} where {sorted(want.get(job, []))} are due"
        for job in sorted(want.keys() | have.keys())
        if have.get(job, []) != sorted(want.get(job, []))
    ]


class _Action(NamedTuple):
    """An action of a stage: the forward or backward of a microbatch, or a step."""

    kind: Literal["forward", "backward", "step"]
    microbatch: int = -1
    step: OptimiserStep | None = None


@dataclass
class _Stage:
    """One stage of one replica while it is replayed."""

    actions: deque[_Action]
    done: set[_Action] = field(default_factory=set)
    steps: Counter[str] = field(default_factory=Counter)  # number of steps taken, by job
    seen: dict[tuple[int, str], int] = field(default_factory=dict)  # number of steps taken when a forward ran
    gradients: dict[str, Counter[int]] = field(default_factory=dict)  # job -> segments by step, not stepped


class _Replay:
    def __init__(self, schedule: Sequence[Entry], depth: Mapping[int, int]) -> None:
        self.faults: list[str] = []
        self.depth = dict(depth)
        self.microbatches: dict[int, list[Microbatch]] = {replica: [] for replica in depth}
        self.first: dict[str, int] = {}  # each job's first step
        self.due: Counter[tuple[int, str, int]] = Counter()  # segments of a global batch on a replica
        steps: dict[int, list[tuple[int, OptimiserStep]]] = {replica: [] for replica in depth}
        for entry in schedule:
            if isinstance(entry, OptimiserStep):
                for replica, own in steps.items():
                    own.append((len(self.microbatches[replica]), entry))
                continue
            self.microbatches[entry.replica].append(entry)
            for segment in entry.segments:
                self.due[entry.replica, segment.job, segment.step] += 1
                self.first[segment.job] = min(self.first.get(segment.job, segment.step), segment.step)
        self.stages = {
            (replica, s): _Stage(_one_f_one_b(len(self.microbatches[replica]), count - s, steps[replica]))
            for replica, count in depth.items()
            for s in range(count)
        }

    def run(self) -> list[str]:
        """Replay until every list is empty, a fault is found, or nothing can proceed."""
        while not self.faults and any(self._advance(where) for where in self.stages):
            pass
        left = {where: stage.actions[0] for where, stage in self.stages.items() if stage.actions}
        if left and not self.faults:
            self.faults.append(f"deadlock: (replica, stage) waits for {left}")
        return self.faults

    def _advance(self, where: Where) -> bool:
        """Run a stage as far as possible; return whether it made progress."""
        stage, moved = self.stages[where], False
        run = {"forward": self._forward, "backward": self._backward, "step": self._step}
        while stage.actions and not self.faults and self._may(where, stage.actions[0]):
            action = stage.actions.popleft()
            run[action.kind](where, stage, action)
            stage.done.add(action)
            moved = True
        return moved

    def _may(self, where: Where, action: _Action) -> bool:
        """Whether all inputs from elsewhere have arrived: activations, gradients, or other replicas for a
        step."""
        replica, s = where
        if action.kind == "forward":
            return s == 0 or action in self.stages[replica, s - 1].done
        if action.kind == "backward":
            return s == self.depth[replica] - 1 or action in self.stages[replica, s + 1].done
        return all(
            _Action("step", step=action.step) in other.done
            or bool(other.actions and other.actions[0].step == action.step)
            for other in self.stages.values()
        )

    def _forward(self, where: Where, stage: _Stage, action: _Action) -> None:
        for segment in self.microbatches[where[0]][action.microbatch].segments:
            stage.seen[action.microbatch, segment.job] = stage.steps[segment.job]
            if stage.steps[segment.job] != segment.step - self.first[segment.job]:
                self._fault(where, action, segment, f"sees weights after {stage.steps[segment.job]} steps")

    def _backward(self, where: Where, stage: _Stage, action: _Action) -> None:
        if _Action("forward", action.microbatch) not in stage.done:
            self.faults.append(f"{where}: backward of {action.microbatch} before its forward")
        for segment in self.microbatches[where[0]][action.microbatch].segments:
            if stage.seen.get((action.microbatch, segment.job)) != stage.steps[segment.job]:
                self._fault(where, action, segment, "sees other weights than its forward")
            stage.gradients.setdefault(segment.job, Counter())[segment.step] += 1

    def _step(self, where: Where, stage: _Stage, action: _Action) -> None:
        assert action.step is not None
        job, step = action.step.job, action.step.step
        have, due = dict(stage.gradients.pop(job, {})), self.due[where[0], job, step]
        if have != ({step: due} if due else {}):
            self.faults.append(
                f"replica {where[0]} stage {where[1]}: step {step} of {job} with gradients of "
                f"{have} segments by step, where {due} segments of step {step} are due"
            )
        stage.steps[job] += 1

    def _fault(self, where: Where, action: _Action, segment: Segment, what: str) -> None:
        self.faults.append(
            f"replica {where[0]} stage {where[1]}: {action.kind} of microbatch {action.microbatch}, "
            f"{segment.job} step {segment.step}, {what}"
        )


def _one_f_one_b(count: int, ahead: int, steps: Sequence[tuple[int, OptimiserStep]]) -> deque[_Action]:
    """A stage's list in 1F1B order, with at most ``ahead`` forwards before their backwards.

    Args:
        steps: each with the number of microbatches before it; a step runs right before the next forward.
    """
    actions: deque[_Action] = deque()
    waiting = deque(steps)
    for index in range(count):
        if index >= ahead:
            actions.append(_Action("backward", index - ahead))
        while waiting and waiting[0][0] <= index:
            actions.append(_Action("step", step=waiting.popleft()[1]))
        actions.append(_Action("forward", index))
    actions.extend(_Action("backward", index) for index in range(max(0, count - ahead), count))
    actions.extend(_Action("step", step=step) for _, step in waiting)
    return actions

"""A worker that stands for several processes, which hold replicas of the base model.

A seam: it does not know how its processes were started. Every replica has every adapter, with its moments:
whole in its one process, or in parts in its stages. Microbatches go to the replica that they name; the
processes add up a job's gradients in the order of the replicas as soon as they are complete, and all step
alike.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from statistics import median
from typing import TypeVar

from plait.core.errors import LostProcessError, ProcessError, ShortStageError
from plait.core.jobs import DataSpec
from plait.core.messages import (
    Attach,
    Attached,
    Command,
    Detach,
    Evaluate,
    Export,
    Generate,
    Generated,
    JobFailed,
    KeepWeights,
    MicrobatchDone,
    OutOfMemory,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    ScheduleDone,
    StepDone,
    StepJob,
    WorkerEvent,
)
from plait.core.plans import Microbatch
from plait.core.settings import ClusterSettings, EngineSettings
from plait.core.spans import ProcessState, ReplicaSpans
from plait.distributed.channel import Answer, Build, Choose, Measure, Provide, Share, TakeTiles
from plait.distributed.processes import Asked, Processes
from plait.engine.catalogue import DataCatalogue
from plait.engine.schedules import Round, rounds
from plait.engine.worker import WorkerFacts

Value = TypeVar("Value")
Merge = Callable[[Mapping[int, Answer]], Sequence[WorkerEvent]]  # the answers of all stages into one's


class Fleet:
    """A :class:`~plait.engine.worker.Worker` over processes that have loaded their model.

    Args:
        memory_bytes: of each process, on a processor that they share; None: each says what its device has.
        cluster: with the capacity and speed of each process, if they are given.
        tiles: of the kernels, as the facts had them when the search was started.
    """

    def __init__(
        self,
        processes: Processes,
        data: DataCatalogue,
        engine: EngineSettings,
        memory_bytes: int | None,
        cluster: ClusterSettings,
        tiles: str = "",
    ) -> None:
        self.processes = processes
        self._data = data
        self._provided: set[DataSpec] = set()
        self._sharded = cluster.optimiser == "sharded"
        self._staged = cluster.staged
        self._lockstep = cluster.shard_base
        self._replicas = [range(*each) for each in pairwise([0, *accumulate(cluster.stages)])]  # processes
        self._begun: deque[tuple[Asked, Merge]] = deque()  # by a pipeline, not yet answered
        self._flying = False  # whether the last schedule left a pipeline undrained
        self._done = [deque[Sequence[WorkerEvent]]() for _ in range(len(processes))]  # schedules, by stage
        if tiles:
            self.processes.ask_all(TakeTiles(tiles))
        self.facts = self._with_tiles(tiles, *self._build(engine, memory_bytes, cluster))

    def _build(
        self, engine: EngineSettings, memory_bytes: int | None, cluster: ClusterSettings
    ) -> tuple[WorkerFacts, Sequence[WorkerFacts]]:
        """Make all workers; the first one's choice of kernels holds for all. The facts that all share, and
        those of each."""
        capacities = {} if self._staged else dict(enumerate(cluster.capacities))
        chosen_first = self.processes.ask({0: Choose(engine.kernels)})
        engine = replace(engine, kernels=chosen_first[0].kernels)
        own = {
            number: Build(
                replace(engine, capacity=capacities.get(number, engine.capacity)),
                self._sharded,
                cluster.shapes,
                cluster.layer_split,
                cluster.shard_base,
            )
            for number in range(len(self.processes))
        }
        answers = self.processes.ask(own)
        built = [answer.facts for answer in answers.values() if answer.facts is not None]
        chosen = built[0]
        for process, facts in zip(self.processes.all, built, strict=True):
            if facts.model != chosen.model:
                raise ProcessError(
                    f"{process} has loaded a different model from {self.processes.all[0]}",
                    "All processes must train with the same base model.",
                    "Set model.revision, or wait until the model's files no longer change.",
                )
        kinds = tuple(kind for facts in built for kind in facts.kinds)
        devices = self._devices = tuple(device for facts in built for device in facts.devices)
        parts = [
            replace(part, memory_bytes=memory_bytes or part.memory_bytes)
            for facts in built
            for part in facts.parts[0]
        ]
        held = tuple(tuple(parts[own.start : own.stop]) for own in self._replicas)
        shared = replace(
            chosen,
            shape=replace(
                chosen.shape,
                weight_bytes=sum(part.weight_bytes for part in held[0][:: held[0][0].tensor]),
                made_bytes=max(part.made_bytes for part in held[0]),
            ),
            memory_bytes=min(part.memory_bytes for own in held for part in own),
            devices=self._each(devices, " + ".join),
            kinds=kinds,
            capacities=self._each(cluster.capacities, sum),
            held=held,
            speeds=self._each(cluster.speeds or self._speeds(kinds), min),
        )
        return shared, built

    def _with_tiles(self, before: str, shared: WorkerFacts, built: Sequence[WorkerFacts]) -> WorkerFacts:
        """The facts with the tiles that all take: on one kind of device a layer's bits are the same in every
        process, those of the first one that has the layer. It has those from before, if it can read them."""
        tiles: dict[str, dict[str, object]] = json.loads(before or "{}")
        for facts in reversed(built):
            own: dict[str, object] = json.loads(facts.chosen.get("tiles", "{}"))
            if own:
                tiles[facts.kinds[0]] = tiles.get(facts.kinds[0], {}) | own
        if not tiles:
            return shared
        text = json.dumps(tiles, sort_keys=True)
        self.processes.ask_all(TakeTiles(text))
        return replace(shared, chosen=shared.chosen | {"tiles": text})

    def _each(self, values: Sequence[Value], merged: Callable[[Sequence[Value]], Value]) -> tuple[Value, ...]:
        """One value for each replica, from those of its processes; none if there are none."""
        return tuple(merged(values[own.start : own.stop]) for own in self._replicas if values)

    def _speeds(self, kinds: tuple[str, ...]) -> tuple[float, ...]:
        """How fast the processes are, relative to the slowest; devices of one kind are alike.

        Measured only if there are several kinds, and rounded, since it is recorded.
        """
        if len(set(kinds)) < 2:
            return (1.0,) * len(self.processes)
        answers = self.processes.ask_all(Measure())
        of_kind = {
            kind: median(answers[number].rate for number, own in enumerate(kinds) if own == kind)
            for kind in kinds
        }
        return tuple(round(of_kind[kind] / min(of_kind.values()), 1) for kind in kinds)

    def take_spans(self) -> Sequence[ReplicaSpans]:
        """What each replica did since the last call."""
        pairs = zip(self.processes.all, self._devices, strict=True)
        return [process.take_spans(device) for process, device in pairs]

    def states(self) -> Sequence[ProcessState]:
        """How each process is doing now."""
        pairs = zip(self.processes.all, self._devices, strict=True)
        return [process.state(device, self.processes.silence) for process, device in pairs]

    # ---- commands --------------------------------------------------------------------------------------

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        """Carry out one command on the processes that it concerns.

        Raises:
            StorageError: a checkpoint or an adapter cannot be written.
            ProcessError: a process died.
        """
        before = self.processes.spent
        try:
            return self._execute(command)
        except LostProcessError as error:
            error.seconds = self.processes.spent - before
            raise

    def _execute(self, command: Command) -> Sequence[WorkerEvent]:
        match command:
            case Attach() if self._flying:
                self._provide(command.job.data)
                self._begin(command, lambda answers: self._attached(command, answers))
                return ()
            case RunSchedule() if self._staged and (self._flying or not command.drained):
                return self._follow(command)
            case Attach():
                self._provide(command.job.data)
                return self._attached(command, self.processes.ask_all(command))
            case RunSchedule() | Evaluate() if self._staged:
                return self._run_stages(command)
            case RunSchedule():
                return self._run_schedule(command)
            case Evaluate(microbatches):
                own = self._shared_out(microbatches)
                return _of_replicas(
                    self.processes.ask({n: Evaluate(each) for n, each in own.items() if each})
                )
            case Generate():
                return self._generate(command)
            case SaveCheckpoint() | Export():
                return self._save(command)
            case Detach() | KeepWeights():
                self.processes.ask_all(command)
                return ()

    def _follow(self, command: RunSchedule) -> Sequence[WorkerEvent]:
        """Send a pipeline what follows while it does what was sent before; what is done by now."""
        self._begin(command, self._schedules_done)
        self._flying = not command.drained
        events: list[WorkerEvent] = []
        while len(self._begun) > self._flying:
            asked, merge = self._begun.popleft()
            events += merge(self.processes.answers(asked))
        return events

    def _begin(self, command: Command, merge: Merge) -> None:
        every = dict.fromkeys(range(len(self.processes)), command)
        self._begun.append((self.processes.begin(every), merge))

    def _schedules_done(self, answers: Mapping[int, Answer]) -> Sequence[WorkerEvent]:
        """The schedules that all stages are done with; some are done earlier than others."""
        for stage, answer in zip(self._done, answers.values(), strict=True):
            stage += [each.events for each in answer.events if isinstance(each, ScheduleDone)]
        found: list[WorkerEvent] = []
        while all(self._done):
            own = [stage.popleft() for stage in self._done]
            found.append(ScheduleDone((*_of_stages(own), *_one_step(own))))
        return found

    def _attached(self, command: Attach, answers: Mapping[int, Answer]) -> Sequence[WorkerEvent]:
        short = {number for number, answer in answers.items() if _out_of_memory(answer.events)}
        if short and self._staged and self._flying:
            error = ShortStageError(
                f"a stage ran out of memory while {command.job.name} was attached",
                "Each stage keeps the activations of several microbatches.",
                "Lower engine.capacity or planner.max_jobs.",
            )
            raise self.processes.ended_by(error)  # they are not done with what was sent after it
        if short:
            self.processes.ask(dict.fromkeys(sorted(answers.keys() - short), Detach(command.job.name)))
            return [_one_shortage([event for answer in answers.values() for event in answer.events])]
        failed = (each for own in answers.values() for each in own.events if isinstance(each, JobFailed))
        event = next(failed, answers[0].events[0])
        spent = sum(answer.seconds for answer in answers.values())
        if not isinstance(event, Attached):
            assert isinstance(event, JobFailed)
            return [replace(event, seconds=spent)]
        if self._staged:  # each has read its own part
            _check_alike(command.job.name, answers)
            return [replace(event, seconds=spent)]
        shared = self.processes.ask_all(Share(command.job.name, best=event.cursor.best_step is not None))
        return [replace(event, seconds=spent + sum(answer.seconds for answer in shared.values()))]

    def _provide(self, spec: DataSpec) -> None:
        """See that all processes have the data of a spec; each content is sent once to each."""
        if spec in self._provided:
            return
        data = self._data.of(spec)
        for asked, _ in self._begun:
            self.processes.answers(asked)  # one that computes takes nothing large, and would count as lost
        requests = {
            number: Provide(spec, data.digest, None if data.digest in each.contents else data)
            for number, each in enumerate(self.processes.all)
        }
        self.processes.ask(requests)
        self._provided.add(spec)
        for each in self.processes.all:
            each.contents.add(data.digest)

    def _run_stages(self, command: RunSchedule | Evaluate) -> Sequence[WorkerEvent]:
        """To the stages of each replica its own microbatches; steps to all."""
        requests: dict[int, Command] = {}
        for number, processes in enumerate(self._replicas):
            own = tuple(each for each in command.microbatches if each.replica == number)
            if isinstance(command, RunSchedule):
                items = (e for e in command.items if isinstance(e, StepJob) or e.replica == number)
                requests |= dict.fromkeys(processes, replace(command, items=tuple(items)))
            elif own:
                requests |= dict.fromkeys(processes, Evaluate(own))
        answers = self.processes.ask(requests)
        events: list[WorkerEvent] = []
        for processes in self._replicas:
            events += _of_stages([answers[n].events for n in processes if n in answers])
        return [*events, *_one_step(_opened(each.events) for each in answers.values())]

    def _run_schedule(self, command: RunSchedule) -> Sequence[WorkerEvent]:
        """Round by round, since all replicas add up at the end of each; the rest is left if memory runs
        out."""
        events: list[WorkerEvent] = []
        for each in rounds(command.items):
            events += self._run_round(each)
            if _out_of_memory(events):
                break
        return events

    def _run_round(self, turn: Round) -> Sequence[WorkerEvent]:
        """To each replica its own microbatches, and all steps."""
        own = self._shared_out(turn.microbatches).items()
        return _of_replicas(self.processes.ask({n: RunSchedule((*each, *turn.steps)) for n, each in own}))

    def _shared_out(self, microbatches: Sequence[Microbatch]) -> dict[int, tuple[Microbatch, ...]]:
        """Each process's microbatches; where all gather the base model together, as many for each."""
        own: dict[int, list[Microbatch]] = {number: [] for number in range(len(self.processes))}
        for item in microbatches:
            own[item.replica].append(item)
        most = max(map(len, own.values())) if self._lockstep else 0
        return {
            number: (*each, *(Microbatch(number, index, ()) for index in range(len(each), most)))
            for number, each in own.items()
        }

    def _save(self, command: SaveCheckpoint | Export) -> Sequence[WorkerEvent]:
        """Have those write a job together that hold it: all stages, or with its moments all processes."""
        holders = range(1)
        if self._staged:
            holders = self._replicas[0]
        elif self._sharded and isinstance(command, SaveCheckpoint):
            holders = range(len(self.processes))
        answers = self.processes.ask(dict.fromkeys(holders, command))
        return [Saved(command.job, sum(answer.seconds for answer in answers.values()))]

    def _generate(self, command: Generate) -> Sequence[WorkerEvent]:
        """The jobs are shared out in turn; answers come in the order asked for."""
        count = len(self.processes)
        own = {number: command.jobs[number::count] for number in range(count)}
        answers = self.processes.ask(
            {number: replace(command, jobs=jobs) for number, jobs in own.items() if jobs}
        )
        said: dict[str, WorkerEvent] = {}
        for event in (each for answer in answers.values() for each in answer.events):
            assert isinstance(event, Generated | JobFailed)
            said[event.job] = event
        return [said[each.job] for each in command.jobs]


def _of_replicas(answers: Mapping[int, Answer]) -> Sequence[WorkerEvent]:
    """The events of replicas that ran microbatches of their own, and the same steps."""
    events = [event for answer in answers.values() for event in answer.events]
    ran = [event for event in events if not isinstance(event, StepDone | OutOfMemory)]
    short = [_one_shortage(events)] if _out_of_memory(events) else []
    return [*ran, *_one_step(each.events for each in answers.values()), *short]


def _out_of_memory(events: Sequence[WorkerEvent]) -> bool:
    return any(isinstance(event, OutOfMemory) for event in events)


def _one_shortage(events: Sequence[WorkerEvent]) -> OutOfMemory:
    """One event for all processes that ran out of memory."""
    short = [event for event in events if isinstance(event, OutOfMemory)]
    detail = next((event.detail for event in short if event.detail), "")
    return OutOfMemory(detail, sum(event.seconds for event in short))


def _check_alike(job: str, answers: Mapping[int, Answer]) -> None:
    """Check that all stages resume a job from the same step.

    Raises:
        ProcessError: they do not.
    """
    events = (event for each in answers.values() for event in each.events)
    cursors = [event.cursor for event in events if isinstance(event, Attached)]
    if len(cursors) < len(answers) or len({repr(each) for each in cursors}) > 1:
        steps = ", ".join(str(each.step) for each in cursors)
        raise ProcessError(
            f"the stages have read different checkpoints of {job}: of steps {steps or 'unknown'}",
            "Each stage reads its own part of a checkpoint from the search's folder.",
            "Put tracking.root where all hosts see the same files.",
        )


def _of_stages(events: Sequence[Sequence[WorkerEvent]]) -> Sequence[WorkerEvent]:
    """The microbatches of one replica, given the events of its stages: losses of the last, seconds of all."""
    if not events:
        return []
    own = [_opened(each) for each in events]
    done: dict[int, list[MicrobatchDone]] = {}
    for event in chain.from_iterable(own):
        if isinstance(event, MicrobatchDone):
            done.setdefault(event.index, []).append(event)
    return [
        _of_one(event, done[event.index]) if isinstance(event, MicrobatchDone) else event
        for event in own[-1]
        if not isinstance(event, StepDone)
    ]


def _of_one(event: MicrobatchDone, stages: Sequence[MicrobatchDone]) -> MicrobatchDone:
    """A microbatch with the seconds of all stages, and their peaks if all were observed."""
    peaks = tuple(peak for each in stages for peak in each.peaks)
    seconds = sum(each.seconds for each in stages)
    return replace(event, seconds=seconds, peaks=peaks if len(peaks) == len(stages) else ())


def _opened(events: Sequence[WorkerEvent]) -> list[WorkerEvent]:
    """Events, and those of schedules that are done."""
    return [one for each in events for one in (each.events if isinstance(each, ScheduleDone) else (each,))]


def _one_step(answers: Iterable[Sequence[WorkerEvent]]) -> Sequence[WorkerEvent]:
    """The events of one process, with the time of all: replicas step alike.

    Raises:
        ProcessError: they did not.
    """
    said = [
        sorted((e for e in each if isinstance(e, StepDone)), key=lambda event: (event.job, event.step))
        for each in answers
    ]
    merged: list[WorkerEvent] = []
    for own in zip(*said, strict=True):
        if len({repr(replace(event, seconds=0.0)) for event in own}) > 1:
            raise ProcessError(
                f"the replicas' optimiser steps differ: {'; '.join(map(repr, own))}",
                "All replicas must get the same weights from the same sums.",
                "Use processors of one kind and the same engine.threads for all processes.",
            )
        merged.append(replace(own[0], seconds=sum(event.seconds for event in own)))
    return merged

"""A worker that stands for several processes, each with a replica of the base model.

A seam: it does not know how its processes were started. Every process has every adapter whole, with its
moments. Microbatches go to the replica that they name; before a step, the processes add up the job's
gradients in the order of the processes, and all step alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait

from plait.core.errors import PlaitError, ProcessError
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
    RunMicrobatches,
    SaveCheckpoint,
    StepJobs,
    WorkerEvent,
)
from plait.core.settings import EngineSettings
from plait.distributed.channel import (
    Answer,
    Beat,
    Build,
    Channel,
    DropGradients,
    Hello,
    Provide,
    Refusal,
    Share,
)
from plait.engine.catalogue import DataCatalogue
from plait.engine.worker import WorkerFacts


@dataclass(slots=True)
class Process:
    """A process of the run, as the coordinator sees it.

    Attributes:
        busy: seconds for which it carried out requests, waiting for others included.
        doing: the last request, in words.
    """

    hello: Hello
    channel: Channel
    busy: float = 0.0
    doing: str = "started"
    heard: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"process {self.hello.process} ({self.hello.host}, pid {self.hello.pid})"


class Fleet:
    """A :class:`~plait.engine.worker.Worker` over processes that have loaded their model.

    Args:
        processes: in the order of their numbers.
        silence: seconds without a sign of life after which a process counts as dead.
        closed: called once, at the end, to see that the processes have ended.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        data: DataCatalogue,
        engine: EngineSettings,
        *,
        silence: float,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._processes = list(processes)
        self._data = data
        self._silence = silence
        self._closed = closed
        self._provided: set[DataSpec] = set()
        self._jobs: set[str] = set()
        self.facts = self._build(engine)

    def _build(self, engine: EngineSettings) -> WorkerFacts:
        """Make all workers; the first one's choice of kernels holds for all."""
        first, *others = self._processes
        answers = self._ask({first.hello.process: Build(engine)})
        chosen = answers[0].facts
        assert chosen is not None
        same = replace(engine, kernels=chosen.chosen["kernels"])
        answers |= self._ask({each.hello.process: Build(same) for each in others})
        return self._agree([each.facts for each in answers.values() if each.facts is not None])

    def _agree(self, built: Sequence[WorkerFacts]) -> WorkerFacts:
        """The facts that hold for all processes: the least memory, shared by processes on one processor."""
        for process, each in zip(self._processes, built, strict=True):
            if each.model != built[0].model:
                raise ProcessError(
                    f"{process} has loaded another model than {self._processes[0]}",
                    "All processes train over the same base model.",
                    "Give model.revision, or copy the same files to all hosts.",
                )
        on_host = Counter(process.hello.host for process in self._processes)
        memory = [
            each.memory_bytes // (on_host[process.hello.host] if each.devices == ("cpu",) else 1)
            for process, each in zip(self._processes, built, strict=True)
        ]
        devices = tuple(device for each in built for device in each.devices)
        return replace(built[0], memory_bytes=min(memory), devices=devices)

    # ---- commands --------------------------------------------------------------------------------------

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        """Carry out one command on the processes that it concerns.

        Raises:
            StorageError: a checkpoint or an adapter cannot be written.
            ProcessError: a process died.
        """
        match command:
            case Attach():
                return self._attach(command)
            case RunMicrobatches() | Evaluate():
                return self._run(command)
            case StepJobs():
                return _one_step(self._all(command))
            case Generate():
                return self._generate(command)
            case SaveCheckpoint() | Export():
                return self._ask({0: command})[0].events
            case Detach() | KeepWeights():
                self._all(command)
                self._jobs -= {command.job} if isinstance(command, Detach) else set()
                return ()

    def _attach(self, command: Attach) -> Sequence[WorkerEvent]:
        spec = command.job.data
        if spec not in self._provided:
            self._all(Provide(spec, self._data.of(spec)))
            self._provided.add(spec)
        answers = self._all(command)
        short = {number for number, answer in answers.items() if _out_of_memory(answer.events)}
        if short:
            self._ask({number: Detach(command.job.name) for number in answers if number not in short})
            return [_one_shortage([event for answer in answers.values() for event in answer.events])]
        self._jobs.add(command.job.name)
        (event,) = answers[0].events
        spent = sum(answer.seconds for answer in answers.values())
        if not isinstance(event, Attached):
            assert isinstance(event, JobFailed)
            return [replace(event, seconds=spent)]
        shared = self._all(Share(command.job.name, best=event.cursor.best_step is not None))
        return [replace(event, seconds=spent + sum(answer.seconds for answer in shared.values()))]

    def _run(self, command: RunMicrobatches | Evaluate) -> Sequence[WorkerEvent]:
        """Each replica's own microbatches; where one runs out of memory, nothing is left of any."""
        numbers = sorted({each.replica for each in command.microbatches})
        own = {
            number: tuple(each for each in command.microbatches if each.replica == number)
            for number in numbers
        }
        answers = self._ask({number: replace(command, microbatches=each) for number, each in own.items()})
        events = [event for answer in answers.values() for event in answer.events]
        if not _out_of_memory(events):
            return events
        self._all(DropGradients())
        done = [event for event in events if isinstance(event, MicrobatchDone)]
        return [*done, _one_shortage(events)]

    def _generate(self, command: Generate) -> Sequence[WorkerEvent]:
        """The jobs are shared out in turn; answers come in the order asked for."""
        count = len(self._processes)
        own = {number: command.jobs[number::count] for number in range(count)}
        answers = self._ask({number: replace(command, jobs=jobs) for number, jobs in own.items() if jobs})
        said: dict[str, WorkerEvent] = {}
        for event in (each for answer in answers.values() for each in answer.events):
            assert isinstance(event, Generated | JobFailed)
            said[event.job] = event
        return [said[each.job] for each in command.jobs]

    # ---- processes -------------------------------------------------------------------------------------

    @property
    def jobs(self) -> frozenset[str]:
        """The jobs that are in."""
        return frozenset(self._jobs)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each process carried out requests."""
        return tuple(process.busy for process in self._processes)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.channel.close()
        self._closed()

    def _all(self, request: object) -> Mapping[int, Answer]:
        return self._ask({process.hello.process: request for process in self._processes})

    def _ask(self, requests: Mapping[int, object]) -> dict[int, Answer]:
        """Send each process its request and wait for all answers, in the order of the processes.

        Raises:
            ProcessError: a process died, or was silent for too long: then all are ended.
            PlaitError: what a process says cannot be done, once all have answered.
        """
        pending: dict[object, Process] = {}
        for number, request in requests.items():
            process = self._processes[number]
            process.doing, process.heard = type(request).__name__, time.monotonic()
            pending[process.channel.connection] = process
            try:
                process.channel.send(request)
            except OSError as error:
                raise self._lost(process, "its link closed") from error
        answers: dict[int, Answer] = {}
        refused: dict[int, PlaitError] = {}
        while pending:
            ready = wait([each.channel.connection for each in pending.values()], timeout=1.0)
            for process in [pending[link] for link in ready]:
                match self._receive(process):
                    case Answer() as answer:
                        answers[process.hello.process] = answer
                        process.busy += answer.seconds
                        del pending[process.channel.connection]
                    case Refusal() as refusal:
                        refused[process.hello.process] = refusal.error
                        del pending[process.channel.connection]
            for process in pending.values():
                if (silent := time.monotonic() - process.heard) > self._silence:
                    raise self._lost(process, f"it was silent for {silent:.0f} s")
        for number in sorted(refused):
            raise refused[number]
        return {number: answers[number] for number in sorted(answers)}

    def _receive(self, process: Process) -> Answer | Refusal | Beat:
        try:
            message = process.channel.receive()
        except (EOFError, OSError) as error:
            raise self._lost(process, "it died") from error
        process.heard = time.monotonic()
        assert isinstance(message, Answer | Refusal | Beat)
        return message

    def _lost(self, process: Process, how: str) -> ProcessError:
        """End all processes, since those left may wait for this one; what to say of it."""
        self.close()
        return ProcessError(
            f"{process}: {how} ({process.doing})",
            "A run ends where one of its processes does; checkpoints are whole.",
            "The same command resumes the search.",
        )


def _out_of_memory(events: Sequence[WorkerEvent]) -> bool:
    return any(isinstance(event, OutOfMemory) for event in events)


def _one_shortage(events: Sequence[WorkerEvent]) -> OutOfMemory:
    """One event for all processes that ran out of memory."""
    short = [event for event in events if isinstance(event, OutOfMemory)]
    return OutOfMemory(short[0].detail, sum(event.seconds for event in short))


def _one_step(answers: Mapping[int, Answer]) -> Sequence[WorkerEvent]:
    """The events of one process, with the time of all: replicas step alike.

    Raises:
        ProcessError: they did not.
    """
    said = [answer.events for answer in answers.values()]
    merged: list[WorkerEvent] = []
    for own in zip(*said, strict=True):
        if len({repr(replace(event, seconds=0.0)) for event in own}) > 1:
            raise ProcessError(
                f"replicas that stepped apart: {'; '.join(map(repr, own))}",
                "All replicas step from the same sums to the same weights.",
                "Use processors of one kind and the same engine.threads for all processes.",
            )
        merged.append(replace(own[0], seconds=sum(event.seconds for event in own)))
    return merged

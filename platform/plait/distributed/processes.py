"""The processes of a run as the coordinator sees them: it asks them, and waits with a limit.

A seam: the fleet asks through it and knows no links; the launch knows the links and no commands.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import NamedTuple, TypeVar

from plait.core.errors import LostProcessError, PlaitError, ShortStageError
from plait.core.messages import RunSchedule
from plait.core.spans import ProcessState, ReplicaSpans, Span
from plait.distributed.channel import Answer, Beat, Build, Channel, Goodbye, Hello, Refusal
from plait.distributed.clocks import ClockOffset
from plait.engine.span_recorder import MOST_KEPT

TURN = 1.0  # seconds of one wait
# What a process does by its request, in words.
DOING = {
    "Load": "loading the model",
    "See": "looking for the search's folder",
    "Join": "joining the others",
    "Choose": "choosing kernels",
    "TakeTiles": "choosing kernels",
    "Build": "taking its part of the model",
    "Measure": "measuring its speed",
    "Provide": "receiving data",
    "Attach": "attaching a job",
    "Share": "attaching a job",
    "Detach": "detaching a job",
    "RunSchedule": "training",
    "Evaluate": "evaluating",
    "KeepWeights": "evaluating",
    "Generate": "generating",
    "SaveCheckpoint": "saving a checkpoint",
    "Export": "writing an adapter",
}
ASLEEP = 5.0  # seconds between two looks where this process was stopped, too


@dataclass(frozen=True, slots=True)
class Fate:
    """How a process of this host stands: its exit status, None while it lives, and where its output is."""

    status: int | None
    log: str


Said = TypeVar("Said", bound=PlaitError)
Ending = TypeVar("Ending", bound=PlaitError)


@dataclass(slots=True, eq=False)
class Asked:
    """What was sent to some processes at once, and what they have answered, by their numbers."""

    left: set[int]
    answers: dict[int, Answer] = field(default_factory=dict)
    refused: dict[int, PlaitError] = field(default_factory=dict)
    together: bool = False  # whether each waits for all others before it answers


class Begun(NamedTuple):
    """A request to one process: the time before it was sent, and whether no other was before it then."""

    asked: Asked
    sent: float
    alone: bool


@dataclass(slots=True, eq=False)
class Process:
    """A process of the run.

    Attributes:
        doing: the last request, in words.
        asked: when that was sent, or the one before it answered.
        busy: whether it is not answered yet.
        begun: requests that are not answered.
        heard: time of its last sign of life.
        loaded: digest of the model that it has loaded; "": none yet.
        contents: digests of the data sets that it has.
        clock: how far its clock is from this process's.
        spans: what it did, as far as no one has taken that.
    """

    hello: Hello
    channel: Channel
    doing: str = "starting"
    asked: float = field(default_factory=time.monotonic)
    busy: bool = False
    begun: deque[Begun] = field(default_factory=deque)
    heard: float = field(default_factory=time.monotonic)
    loaded: str = ""
    contents: set[str] = field(default_factory=set)
    clock: ClockOffset = field(default_factory=ClockOffset)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))

    @property
    def ready(self) -> bool:
        """Whether it has loaded the model and can join others."""
        return bool(self.loaded) and not self.busy

    def send(self, request: object) -> None:
        """Send it a request.

        Raises:
            OSError: it is gone, or does not take it.
        """
        if not self.busy:
            self.asked = time.monotonic()
        self.doing, self.busy = DOING[type(request).__name__], True
        self.channel.send(request)

    def __str__(self) -> str:
        return f"process {self.hello.process} ({self.hello.host}, pid {self.hello.pid})"

    def state(self, device: str, limit: float) -> ProcessState:
        """How it is doing; ``limit``: seconds of silence after which it counts as dead."""
        now, hello = time.monotonic(), self.hello
        doing = self.doing if self.busy else ""
        silent = now - self.heard if self.busy else 0.0
        return ProcessState(
            hello.process, hello.host, hello.pid, device, doing, now - self.asked, silent, limit
        )

    def take_spans(self, device: str) -> ReplicaSpans:
        """What it did since the last call."""
        taken = tuple(self.spans)
        self.spans.clear()
        hello, clock = self.hello, self.clock
        return ReplicaSpans(hello.process, hello.host, hello.pid, device, taken, clock.seconds, clock.error)


class Processes:
    """All processes of a run, in the order of their numbers.

    Args:
        silence: seconds without a sign of life after which a process counts as dead.
        fate: says how a process stands, by the number it was launched with; None: it is not known here.
        ended: called at the end, to see that all have ended; with whether one was lost.

    Attributes:
        watch: called every second or more often while processes are waited for.
        dismissed: those that know that the run is over, by the numbers they were launched with.
        spent: device seconds of all requests so far, those that came to nothing, too.
        culprit: the number of the one that was lost; None if none was, or it is not known which.
        how: how it was lost, in words.
        status: with which it has ended by itself, if it has and that is known.
        error: since one was lost: what was said then.
        refused: what was refused of what was sent last, and why, by the processes' places.
    """

    def __init__(
        self,
        silence: float,
        fate: Callable[[int], Fate | None],
        ended: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.all: list[Process] = []
        self.watch: Callable[[], None] = lambda: None
        self.silence = silence
        self._fate = fate
        self._ended = ended
        self._lost_one = self._closed = False
        self._looked = -math.inf  # when it was last seen who has sent something
        self.dismissed: set[int] = set()
        self.spent = 0.0
        self.culprit: int | None = None
        self.how = ""
        self.status: int | None = None
        self.error: PlaitError | None = None
        self.refused: Mapping[int, PlaitError] = {}

    @property
    def live(self) -> bool:
        """Whether they can be asked."""
        return not self._closed

    def __len__(self) -> int:
        return len(self.all)

    def ask_all(self, request: object) -> dict[int, Answer]:
        """Send all the same request; as :meth:`ask`."""
        return self.ask(dict.fromkeys(range(len(self.all)), request))

    def ask(self, requests: Mapping[int, object]) -> dict[int, Answer]:
        """Send each process its request and wait for all answers, in the order of the processes.

        Raises:
            LostProcessError: a process died, or was silent for too long: then all are ended.
            PlaitError: what a process says cannot be done, once all have answered.
        """
        return self.answers(self.begin(requests))

    def begin(self, requests: Mapping[int, object]) -> Asked:
        """Send each process its request, which it takes after those before.

        Raises:
            LostProcessError: a process died: then all are ended.
        """
        if self.error is not None:
            raise self.error
        self.refused = {}
        asked = Asked(set(requests), together=any(map(_together, requests.values())))
        for number, request in requests.items():
            process, sent = self.all[number], time.monotonic()
            try:
                process.send(request)
            except OSError as error:
                full = isinstance(error, BlockingIOError)
                raise self.lost(process, "does not accept what is sent to it" if full else "died") from error
            process.begun.append(Begun(asked, sent, alone=not process.begun))
        heard = time.monotonic()  # after the last one: a large data set takes a while to send
        for number in requests:
            self.all[number].heard = heard
        return asked

    def answers(self, asked: Asked) -> dict[int, Answer]:
        """The answers to what was sent, in the order of the processes.

        Raises:
            as :meth:`ask`.
        """
        if self.error is not None:
            raise self.error
        while asked.left:
            self.watch()
            pending: dict[object, tuple[int, Process]] = {
                each.channel.connection: (number, each) for number, each in enumerate(self.all) if each.begun
            }
            for number, process in self._ready(pending):
                match self._receive(process):
                    case Answer() as answer:
                        own = process.begun.popleft().asked
                        own.answers[number] = answer
                        own.left.discard(number)
                    case Refusal(ShortStageError() as short):
                        raise self.ended_by(self._named(number, short))
                    case Refusal(LostProcessError() as broken):
                        raise self._broken(number, broken)
                    case Refusal() as refusal if process.begun[0].asked.together and len(self.all) > 1:
                        self.refused = {number: refusal.error}
                        raise self.ended_by(self._named(number, refusal.error))
                    case Refusal() as refusal:
                        own = process.begun.popleft().asked
                        own.refused[number] = refusal.error
                        own.left.discard(number)
        if asked.refused:
            self.refused = asked.refused
            first = min(asked.refused)
            error = asked.refused[first]
            raise self._named(first, error) if asked.answers else error
        return {number: asked.answers[number] for number in sorted(asked.answers)}

    def look(self) -> None:
        """See that all are there while nothing is asked of them; a sign of life may follow an answer.

        Raises:
            LostProcessError: one is gone.
        """
        for process in self.all:
            while process.channel.connection.poll(0):
                self._receive(process)

    def _broken(self, number: int, error: LostProcessError) -> LostProcessError:
        """End all processes where a link between two of them broke: the others may wait for ever, and say
        that they live. If one of them is seen to have died, the error names that one.

        Raises:
            LostProcessError: one is seen to have died.
        """
        end = time.monotonic() + TURN
        others = [each for at, each in enumerate(self.all) if at != number]
        while others and (left := end - time.monotonic()) > 0:
            links = wait([each.channel.connection for each in others], timeout=left)
            for process in others:
                if process.channel.connection in links:
                    self._receive(process)
        return self.ended_by(self._named(number, error, f" while {self.all[number].doing}"))

    def ended_by(self, error: Ending) -> Ending:
        """End all processes, some of which wait for an answer that will not come."""
        self.spent += sum(time.monotonic() - each.asked for each in self.all if each.busy)
        self.close(lost=True)
        self.error = error
        return error

    def _named(self, number: int, error: Said, doing: str = "") -> Said:
        """What one could not do and others could: then it matters which."""
        return type(error)(f"{self.all[number]}{doing}: {error.value}", error.rule, error.remedy)

    def _ready(self, pending: Mapping[object, tuple[int, Process]]) -> list[tuple[int, Process]]:
        """The processes that have sent something, of those that are to answer.

        Raises:
            LostProcessError: one was silent for too long.
        """
        links = wait([each.channel.connection for _, each in pending.values()], timeout=TURN)
        now = time.monotonic()
        asleep, self._looked = now - self._looked > ASLEEP, now
        for link, (_, process) in pending.items():
            if asleep:  # stopped with the others, by Ctrl-Z, in this wait or in other work before it
                process.heard = now
            if link not in links and (silent := now - process.heard) > self.silence:
                raise self.lost(process, f"was silent for {silent:.0f} s")
        return [pending[link] for link in links]

    def _receive(self, process: Process) -> Answer | Refusal | Beat:
        try:
            message = process.channel.receive()
        except BlockingIOError as error:
            raise self.lost(process, "stopped in the middle of an answer") from error
        except (EOFError, OSError) as error:
            raise self.lost(process, "died") from error
        process.heard = time.monotonic()
        assert isinstance(message, Answer | Refusal | Beat)
        if isinstance(message, Answer):
            first = process.begun[0]
            if first.alone:
                process.clock.learn(first.sent, message.began, message.ended, process.heard)
            process.spans.extend(message.spans)
            self.spent += message.seconds
        elif isinstance(message, Refusal):
            self.spent += process.heard - process.asked
        if not isinstance(message, Beat):
            process.asked, process.busy = process.heard, len(process.begun) > 1
        return message

    def close(self, *, lost: bool = False) -> None:
        """End all processes; where one was lost, those from outside may come again."""
        self._closed = True
        self._lost_one |= lost
        for process in self.all:
            if not self._lost_one:
                with suppress(OSError):
                    process.channel.send(Goodbye())
                    self.dismissed.add(process.hello.process)
            process.channel.close()
            process.busy = False  # it is no longer waited for, so it is not silent
        self._ended(self._lost_one)

    def lost(self, process: Process, how: str) -> LostProcessError:
        """End all processes, since those left may wait for this one; what to say of it.

        Where one was killed, others may have ended because of it: then it is the one to name.
        """
        end = time.monotonic() + TURN
        while how == "died" and _lives(self._fate(process.hello.process)) and time.monotonic() < end:
            time.sleep(0.01)
        fates = {each: self._fate(each.hello.process) or Fate(None, "") for each in self.all}
        killed = [each for each, fate in fates.items() if (fate.status or 0) < 0]
        if how == "died" and killed and process not in killed:
            process = killed[0]
        fate = fates[process]
        status = "" if fate.status is None else f" with status {fate.status}"
        self.culprit, self.how = process.hello.process, f"{how}{status} while {process.doing}"
        self.status = fate.status
        error = LostProcessError(
            f"{process} {self.how}",
            f"The run ends when one of its processes ends; its checkpoints are complete.{fate.log}",
            "The same command resumes the search.",
        )
        return self.ended_by(error)


def _together(request: object) -> bool:
    """Whether a process that carries it out may wait for the others that do."""
    return isinstance(request, RunSchedule) or (isinstance(request, Build) and request.together)


def _lives(fate: Fate | None) -> bool:
    return fate is not None and fate.status is None

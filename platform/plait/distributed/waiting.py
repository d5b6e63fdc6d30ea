"""Processes that have come and do not train yet: they load the model and wait for the next window.

A seam: what comes in at the door ends here; the launch takes from it who trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from plait.distributed.channel import Answer, Channel, Door, Goodbye, Hello, Load, Refusal
from plait.distributed.processes import Process

OTHER_MODEL = "another model than the others have"


class Waiting:
    """Processes that wait, by the numbers that they were launched with.

    Args:
        count: how many processes were launched.
        say: tells the user.

    Attributes:
        all: those that are there.
        left_out: why processes are not let in any more, by their numbers.
    """

    def __init__(self, door: Door, count: int, say: Callable[[str], None]) -> None:
        self.all: dict[int, Process] = {}
        self.left_out: dict[int, str] = {}
        self._say = say
        self._door = door
        self._count = count

    def look(self, seconds: float = 0.0) -> None:
        """Admit processes that arrive within ``seconds``; drop those that are gone."""
        while (came := self._door.next(seconds)) is not None:
            self._welcome(*came)
            seconds = 0.0
        self.all = {number: each for number, each in list(self.all.items()) if self._there(each)}

    def take(self, wanted: Callable[[Process], bool]) -> dict[int, Process]:
        """Take out the processes that are wanted; they wait no more."""
        taken = {number: each for number, each in self.all.items() if wanted(each)}
        self.all = {number: each for number, each in self.all.items() if number not in taken}
        return taken

    def load(self, request: Load, numbers: Collection[int], model: str) -> None:
        """Have these load the model, while others train who have the one of this digest."""
        for number in numbers:
            each = self.all[number]
            if each.loaded not in ("", model):
                self.leave_out(number, OTHER_MODEL)
            elif not each.loaded and not each.busy:
                with suppress(OSError):  # seen at the next look
                    each.send(request)

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        """Take in a process; one that came before under its number is gone."""
        number = hello.process
        if not 0 <= number < self._count:
            dismiss(channel, Goodbye(f"the coordinator waits for {self._count} processes, from 0 on"))
        elif number in self.left_out:
            dismiss(channel, Goodbye(self.left_out[number], wrong=False))
        else:
            if (before := self.all.pop(number, None)) is not None:
                before.channel.close()
            self.all[number] = Process(hello, channel)

    def _there(self, process: Process) -> bool:
        """Whether a process is still there; what it says of loading the model is noted."""
        with suppress(EOFError, OSError):
            while process.channel.connection.poll(0):
                match process.channel.receive():
                    case Answer(model=model):
                        process.loaded, process.busy = model, False
                    case Refusal(error):
                        self.leave_out(process.hello.process, str(error))
                        return False
            return True
        return False

    def leave_out(self, number: int, why: str) -> None:
        """Let a process in no more, and say so."""
        process = self.all.pop(number, None)
        self.left_out[number] = why
        self._say(f"{process or f'process {number}'} is left out: {why}")
        if process is not None:
            dismiss(process.channel, Goodbye(why, wrong=False))

    def dismiss_all(self) -> set[int]:
        """Tell all that there is nothing to do; their numbers."""
        numbers = set(self.all)
        for number in numbers:
            dismiss(self.all.pop(number).channel, Goodbye())
        return numbers


def dismiss(channel: Channel, goodbye: Goodbye) -> None:
    """End a link, and say why."""
    with suppress(OSError):
        channel.send(goodbye)
    channel.close()

"""One worker process of a search on curves, on a study that others may share.

:func:`main` takes the folder, then "leaves" if it is to get a Ctrl-C after its first step, or
"steered=NAME" if its part of the search lies in another folder, has one slot, and obeys orders. Prints
"ready", waits for a line, searches, and prints each step that it trained as a line "JOB STEP".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curve_worker import CurveWorker
from rung_bench import Bench, Notes, halving

from plait.core.messages import Command, Event, JobProgress, RunSchedule, WorkerEvent
from plait.core.settings import SearchSettings
from plait.search import orders
from plait.search.run import Interrupts
from plait.search.storage import open_storage, quiet

TRIALS = 12
STEP_SECONDS = 0.02


def search() -> SearchSettings:
    """Two places in each process, cohorts larger than what one of them trains at a time."""
    return halving(trials=TRIALS, parallel=2, cohort=6)


class SlowWorker(CurveWorker):
    """Takes some time for a step, so that processes that share a search meet."""

    def execute(self, command: Command) -> Sequence[WorkerEvent]:
        if isinstance(command, RunSchedule):
            time.sleep(STEP_SECONDS)
        return super().execute(command)


@dataclass
class Told(Notes):
    """Prints the steps that were trained."""

    leaves: bool = False

    def handle(self, event: Event) -> None:
        if isinstance(event, JobProgress):
            print(event.job, event.step, flush=True)
            if self.leaves:
                self.leaves = False
                os.kill(os.getpid(), signal.SIGINT)


def bench(folder: Path) -> Bench:
    """The search as this process sees it."""
    return Bench(folder / "search", search(), storage=open_storage(None, folder), make_worker=SlowWorker)


def steered(folder: Path, name: str) -> Bench:
    """One with a folder of its own that obeys orders, read often, and does not come to an end."""
    orders.POLL_SECONDS = 0.1
    own = halving(trials=TRIALS, parallel=1, kind="none")
    made = Bench(folder / name, own, open_storage(None, folder), make_worker=SlowWorker)
    made.owner = lambda study, _poll: study.orders.poll()
    made.steps = lambda _: 100_000
    return made


def main(folder: str, *words: str) -> None:
    quiet()
    names = [word.removeprefix("steered=") for word in words if word.startswith("steered=")]
    own = steered(Path(folder), names[0]) if names else bench(Path(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    with Interrupts(lambda: None) as interrupts:
        own.notes = Told(leaves="leaves" in words)
        own.interrupted = lambda: interrupts.requested
        result = own.run()
    print("interrupted" if result.interrupted else "done", flush=True)

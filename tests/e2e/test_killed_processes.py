"""kill -9 to processes of a search that has three, to its coordinator, and to all of them, and one that is
stopped for longer than the limit: in the end all is as if nothing had happened.

``PLAIT_FAULTS=80`` disturbs eighty times in one search, a quarter in each way; without it each once. With
``PLAIT_STAGES=3`` the processes are the stages of a pipeline, and what is killed is always one of them.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import ForkedSearch
from twins import compare

FAULTS = int(os.environ.get("PLAIT_FAULTS", "4"))
STAGES = os.environ.get("PLAIT_STAGES", "1")
STOPPED = "a process that is stopped"
KINDS = ("a process", "the coordinator", "all", STOPPED) if STAGES == "1" else ("a process",)
RESTARTING = ("the coordinator", "all")  # after which the search is begun again
SEED = 20261123
STEPS = 32 if FAULTS <= 12 else 3 * FAULTS  # so that the search outlives them
TOGETHER = ("3 processes", " again after ")  # printed once the processes have come together


def command() -> list[str]:
    return [
        "sweep", "model=tiny", "data.task=chain_sum", "data.size=24", "data.validation=4",
        "train.batch_size=2", f"train.steps={STEPS}", "train.eval_every=8", "adapter.dropout=0.1",
        "adapter.rank=1,2,3,4", "search.sampler=grid", "search.trials=4", "search.parallel=2",
        "search.name=mine", "engine.checkpoint_steps=3", "engine.threads=1", "tracking.points=100000",
        "search/stopping=successive_halving", "search.stopping.cohort=4", "engine.kernels=grouped",
        f"cluster.pipeline={STAGES}", "cluster.processes=3", "cluster.per_host=3",
        "cluster.restarts=1000", "cluster.silence_seconds=5", "cluster.join_seconds=30",
    ]  # fmt: skip


class Disturbed:
    """A search that is killed, or loses processes, again and again.

    Attributes:
        faults: how often in each way.
        came_back: seconds from a fault until the processes were together again.
    """

    def __init__(self, folder: Path, draw: random.Random, apart: float) -> None:
        self._folder, self._draw, self._apart = folder, draw, apart
        self.faults: Counter[str] = Counter()
        self.came_back: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._stopped: list[psutil.Process] = []
        self._search = self._begin()
        self._seen = 0

    def _begin(self) -> ForkedSearch:
        self._seen = 0
        return ForkedSearch(command(), self._folder)

    def _together(self) -> bool:
        return any(text in self._search.output[self._seen :] for text in TOGETHER)

    def _wait(self, kind: str, killed: float) -> None:
        """Until the processes are together or the search has ended."""
        self._search.until(lambda: self._search.status() is not None or self._together())
        if self._together() and kind:
            self.came_back[kind].append(time.monotonic() - killed)

    def run(self, kinds: list[str]) -> None:
        """Disturb in this order until the search ends, or the faults do; those that are stopped and whose
        coordinator was killed wake only then."""
        self._wait("", 0.0)
        while kinds and self._lives():
            time.sleep(self._draw.uniform(0.0, self._apart))
            kind = kinds[0]
            self._seen = len(self._search.output)
            if not self._disturb(kind):
                continue
            kinds.pop(0)
            self.faults[kind] += 1
            killed = time.monotonic()
            if kind in RESTARTING:
                self._search.end()
                self._search = self._begin()
            if self._draw.random() < 0.75:  # else perhaps while the processes come together
                self._wait(kind, killed)
        while self._lives():
            self._search.end()
        assert self._search.status() == 0, self._search.output
        for each in self._stopped:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)
                each.wait(60.0)

    def _lives(self) -> bool:
        """Whether the search has not ended; where a process was killed before all had come the first time,
        which ends the run, it is begun again."""
        if self._search.status() not in (None, 0) and "View with" not in self._search.output:
            self._search = self._begin()
        return self._search.status() is None

    def _disturb(self, kind: str) -> bool:
        """Kill or stop one, or kill all; whether there was something to disturb."""
        found = self._search.processes()
        if not found or self._search.status() is not None:
            return False
        if kind != "the coordinator":
            for each in found if kind == "all" else [self._draw.choice(found)]:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGSTOP if kind == STOPPED else signal.SIGKILL)
                self._stopped += [each] * (kind == STOPPED)
        return kind not in RESTARTING or self._search.kill() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(3600 if len(KINDS) < FAULTS else 900)  # a loaded machine takes long
def test_a_search_whose_processes_are_killed_or_stopped_ends_as_one_whose_are_not(
    place: Callable[[str], Path],
) -> None:
    whole = place("whole")
    undisturbed = ForkedSearch(command(), whole)
    undisturbed.until("3 processes")
    began = time.monotonic()
    assert undisturbed.end() == 0, undisturbed.output
    training = time.monotonic() - began
    draw = random.Random(SEED)
    kinds = [KINDS[number % len(KINDS)] for number in range(FAULTS)]
    draw.shuffle(kinds)
    broken = place("broken")
    disturbed = Disturbed(broken, draw, training / FAULTS)
    disturbed.run(kinds)
    assert sum(disturbed.faults.values()) == FAULTS
    # A job at a rung is attached once more by the next coordinator: what that takes is written nowhere.
    points = compare(broken, whole, adds_up=False)
    back = "; ".join(
        f"after {kind} {sorted(each)[len(each) // 2]:.1f} s"
        for kind, each in disturbed.came_back.items()
        if each
    )
    print(f"{dict(disturbed.faults)}; together again in the median {back}; {points} points equal")

"""Seconds that a device needs for some work, apart from those in which the host asks for it.

On a CUDA device the work is queued behind a spin, so that the device runs it without waiting for the host,
and timed by events. If the host was too slow for the spin, the time is not used and the spin is doubled.
Work that waits for the device, or asks for more than the device's queue takes (about a thousand launches), is
never all queued: the host then waits for the spin, too, so its time is taken from a run without one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

LONGEST_SPIN = 1.0  # seconds; work that is not queued by then waits for the device itself
_SPIN_OVER_HOST = 1.5
_FIRST_SPIN = 1e-3
_CYCLES = 2.1e9  # of a second, at least: a faster clock would shorten the spin, a slower one lengthens it


@dataclass(frozen=True)
class Taken:
    """Seconds of one run.

    Args:
        device: of the device; on a CPU, which is its own device, of everything.
        host: until the run's work was queued; if it never all was, of a run that begins on an idle device.
        queued: whether the device never waited for the host; otherwise `device` has host time in it.
    """

    device: float
    host: float
    queued: bool = True


class Mark(Protocol):
    """A point in the device's work, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to a later point, once the device has come there."""


class Queue(Protocol):
    """A device that works through what it is asked for in order while the host continues."""

    def clock(self) -> float:
        """Seconds of the host."""

    def spin(self, seconds: float) -> None:
        """Keep the device busy."""

    def mark(self) -> Mark:
        """The point after all that was asked for so far."""

    def finish(self) -> None:
        """Wait until the device is idle."""


class _CudaQueue:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def clock(self) -> float:
        return time.perf_counter()

    def spin(self, seconds: float) -> None:
        cuda: Any = torch.cuda
        cuda._sleep(int(seconds * _CYCLES))

    def mark(self) -> Mark:
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        found: Mark = event
        return found

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


def taken(
    run: Callable[[], object], device: torch.device, *, warmup: int = 3, repeats: int = 10
) -> list[Taken]:
    """What each repeat takes."""
    for _ in range(warmup):
        run()
    if device.type == "cuda":
        with torch.cuda.device(device):
            return queued(run, _CudaQueue(device), repeats)
    return [_on_host(run) for _ in range(repeats)]


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of the device's seconds."""
    return statistics.median(each.device for each in taken(run, device))


def _on_host(run: Callable[[], object]) -> Taken:
    start = time.perf_counter()
    run()
    spent = time.perf_counter() - start
    return Taken(spent, spent)


def queued(run: Callable[[], object], queue: Queue, repeats: int) -> list[Taken]:
    """Time each repeat behind a spin that lasts longer than the host needs to ask for it."""
    found: list[Taken] = []
    spin = _FIRST_SPIN
    while len(found) < repeats:
        one = _behind(run, queue, spin)
        if one.queued:
            found.append(one)
        elif spin >= LONGEST_SPIN:
            found.append(replace(one, host=_without_spin(run, queue)))
        spin = min(LONGEST_SPIN, max(spin * (1 if one.queued else 2), _SPIN_OVER_HOST * one.host))
    return found


def _without_spin(run: Callable[[], object], queue: Queue) -> float:
    """Seconds of the host on a device that was idle."""
    queue.finish()
    start = queue.clock()
    run()
    return queue.clock() - start


def _behind(run: Callable[[], object], queue: Queue, spin: float) -> Taken:
    queue.finish()
    queue.spin(spin)
    first, start = queue.mark(), queue.clock()
    run()
    host = queue.clock() - start
    ahead = not first.query()  # the device still spins: all of the work was queued before it began
    last = queue.mark()
    queue.finish()
    return Taken(first.elapsed_time(last) / 1e3, host, ahead)

"""Memory of the worker's device: peaks of microbatches by phase, and recognising out-of-memory errors.

On CUDA, the allocator reports the peak at no cost. On a CPU, live tensor storage is counted operation by
operation (:mod:`plait.cost.peaks`), because the resident size of the process would include the allocator and
everything else in it. Counting slows a microbatch down, so only a sample is counted.

A seam: each kind of device reports its memory differently, and every worker uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from plait.core.messages import ObservedPeak
from plait.cost.memory import KEPT
from plait.cost.peaks import PhasePeaks, meter_of

Result = TypeVar("Result")

FIRST = 4  # iterations that are observed in any case
ENOUGH = 12  # microbatches observed, with which bytes can be fitted
SAMPLED_EARLY, SAMPLED_EVERY = 8, 64  # one iteration in so many, before and after that
LARGER = 1.1  # a microbatch by so much larger than any that was observed is observed

# Known by their words alone: the CPU's allocator, CUDA if it is not torch's own allocator that finds no
# room (a kernel that is loaded), and cuBLAS for its workspace.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the device, or the host, has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def attempt(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The result of an action and None, or None and the first line of its out-of-memory error.

    The error itself is released, because its traceback would keep alive what the action had made.

    Raises:
        Exception: any other error of the action.
    """
    try:
        return action(), None
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return None, str(error).partition("\n")[0] or type(error).__name__


def release_unused(device: torch.device) -> None:
    """Make the device's allocator release its cached memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PeakSampler:
    """Chooses the iterations to observe: early ones, each new group, larger microbatches, and a sample.

    An iteration with a new job is never observed, because what is made once for its adapter and kept would
    count as temporary.

    Args:
        every: one in this many is always observed; 1 observes all.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._asked = 0
        self._observed = 0
        self._seen: set[frozenset[str]] = set()
        self._known: frozenset[str] = frozenset()  # jobs of the previous iteration
        self._largest = 0

    def wanted(self, jobs: Collection[str], tokens: Sequence[int]) -> bool:
        """Whether to observe an iteration of these attached jobs, given the tokens of its microbatches."""
        group, largest = frozenset(jobs), max(tokens, default=0)
        joined, self._known = not group <= self._known, group
        if joined:
            return False
        new = group not in self._seen or largest > LARGER * self._largest
        every = self._every if self._observed >= ENOUGH else min(self._every, SAMPLED_EARLY)
        wanted = new or self._asked < FIRST or self._asked % every == 0
        self._asked += 1
        if wanted:
            self._observed += len(tokens)
            self._seen.add(group)
            self._largest = max(self._largest, largest)
        return wanted


class PeakObserver:
    """Observes microbatches on one device."""

    def __init__(self, device: torch.device, static: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._meter = meter_of(device)  # shared, because it knows what it has counted and what was freed
        self._static = static

    @contextmanager
    def watch(self, wanted: bool) -> Iterator[PhasePeaks]:
        """Observe the code inside, if ``wanted``."""
        if not wanted:
            yield PhasePeaks()
            return
        with self._meter as meter:
            for tensor in self._static():
                meter.add(tensor)
            yield PhasePeaks(meter)


@dataclass(frozen=True, slots=True)
class _Flown:
    """What a microbatch between its forward and its backward has taken.

    Attributes:
        static: bytes that are there without any microbatch.
        own: its highest bytes by phase.
        kept: what it keeps.
        highest: bytes of all at its highest moment.
        unknown: whether others were in flight that were not observed.
    """

    static: int
    own: dict[str, int]
    kept: int
    highest: int
    unknown: bool


class FlightPeaks:
    """Observes microbatches of a stage, several of which are between forward and backward.

    On a CPU, only those that are observed are counted; CUDA's allocator always counts all.
    """

    def __init__(self, device: torch.device, static: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._observer = PeakObserver(device, static)
        self._counts_all = device.type == "cuda"
        self._flying: dict[int, _Flown | None] = {}

    @contextmanager
    def forward(self, number: int, wanted: bool) -> Iterator[PhasePeaks]:
        """Observe a forward, and the backward of the same number later."""
        others = [each for each in self._flying.values() if each is not None]
        unknown = len(others) < len(self._flying)
        wanted = wanted and not (unknown and self._counts_all)
        self._flying[number] = None
        with self._observer.watch(wanted) as peaks:
            yield peaks
            kept = peaks.live - peaks.static
        if wanted:
            static = peaks.static - sum(each.kept for each in others)
            own = {phase: highest - peaks.static for phase, highest in peaks.phases.items()}
            self._flying[number] = _Flown(static, own, kept, max(peaks.phases.values()), unknown)

    @contextmanager
    def backward(self, number: int) -> Iterator[list[ObservedPeak]]:
        """Observe a backward, if the forward was observed; then what came of both is in the list."""
        flown, found = self._flying.pop(number), list[ObservedPeak]()
        with self._observer.watch(flown is not None) as peaks:
            yield found
            peaks.end("backward")
        if flown is None:
            return
        last = peaks.phases["backward"]
        own = flown.own | {"backward": last - peaks.static + flown.kept}
        phases = tuple((phase, flown.static + size) for phase, size in [*own.items(), (KEPT, flown.kept)])
        unknown = flown.unknown or any(each is None for each in self._flying.values())
        beside = max(flown.highest, last) - flown.static - max(own.values())
        found.append(ObservedPeak(flown.static, phases, None if unknown else beside))

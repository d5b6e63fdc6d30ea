"""Microbatches that a device was asked to run, whose losses and seconds are read later.

So the host asks for the next one while the device still runs, and waits once for several. A seam: the one
place that knows how a device says that it has come somewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.core.messages import JobFailed, JobLoss, MicrobatchDone, ObservedPeak, WorkerEvent
from plait.core.plans import Microbatch
from plait.engine.microbatches import job_losses
from plait_kernels import AskedSteps


class Mark(Protocol):
    """A point in a device's work."""

    def wait(self) -> None:
        """Wait until the device has come there."""

    def seconds_to(self, end: Any) -> float:
        """From here to a later point, which the device has come to."""


class _HostMark:
    """A point in the work of a device that the host waits for anyway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._at = clock()

    def wait(self) -> None:
        pass

    def seconds_to(self, end: _HostMark) -> float:
        return end._at - self._at


class CudaMark:
    """A point in the work of the current stream of a CUDA device."""

    def __init__(self, event: Any) -> None:
        self._event = event
        event.record()

    def wait(self) -> None:
        """Wait, but not for what has been done."""
        if not self._event.query():
            self._event.synchronize()

    def seconds_to(self, end: CudaMark) -> float:
        """By the device's clock."""
        return float(self._event.elapsed_time(end._event)) / 1e3


def mark(device: torch.device, clock: Callable[[], float]) -> Mark:
    """The point after all that was asked of a device so far."""
    if device.type != "cuda":
        return _HostMark(clock)
    event: Any = torch.cuda.Event
    return CudaMark(event(enable_timing=True))


def on_its_way(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there once the device has come to a mark that follows; nothing waits."""
    if tensor.device.type == "meta":  # stands for CUDA where waits are counted
        return tensor.to("cpu", non_blocking=True)
    if tensor.device.type != "cuda":
        return tensor
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Asked:
    """A microbatch that a device was asked to run; nothing of it is kept but these.

    Attributes:
        counts: labelled rows of each segment.
        sums: each segment's loss, on its way to the host; own_sums: on the device.
        start, end: around its work.
    """

    microbatch: Microbatch
    counts: tuple[int, ...]
    sums: Tensor
    own_sums: Tensor
    peaks: tuple[ObservedPeak, ...]
    start: Mark
    end: Mark

    def events(self, *, training: bool) -> list[WorkerEvent]:
        """What came of it, which is waited for; the seconds are the device's."""
        self.end.wait()
        losses = job_losses(self.counts, self.microbatch.segments, self.sums)
        return done(
            self.microbatch, losses, self.start.seconds_to(self.end), training=training, peaks=self.peaks
        )


@dataclass(frozen=True, slots=True)
class AskedStep:
    """Optimiser steps that a device was asked to take, their norms on their way to the host.

    Attributes:
        start, end: around their work.
    """

    steps: AskedSteps
    start: Mark
    end: Mark


def done(
    microbatch: Microbatch,
    losses: tuple[JobLoss, ...],
    seconds: float,
    *,
    training: bool,
    peaks: tuple[ObservedPeak, ...] = (),
) -> list[WorkerEvent]:
    """The events of a microbatch; a loss that is not finite fails its job."""
    what = "loss" if training else "validation loss"
    failed = [
        JobFailed(each.job, each.step, f"{what} is {each.loss_sum}")
        for each in losses
        if not math.isfinite(each.loss_sum)
    ]
    return [MicrobatchDone(microbatch.index, losses, seconds, peaks, evaluation=not training), *failed]

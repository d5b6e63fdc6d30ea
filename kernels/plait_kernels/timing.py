"""Medians of seconds on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch


def seconds(run: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> list[float]:
    """Seconds of each repeat; CUDA work is timed by events on the device."""
    for _ in range(warmup):
        run()
    return [_once(run, device) for _ in range(repeats)]


def median_seconds(
    run: Callable[[], object], device: torch.device, *, warmup: int = 3, repeats: int = 10
) -> float:
    """Median of `seconds`."""
    return statistics.median(seconds(run, device, warmup=warmup, repeats=repeats))


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    event = partial(cast("Callable[..., Any]", torch.cuda.Event), enable_timing=True)
    first, last = event(), event()
    torch.cuda.synchronize(device)
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3

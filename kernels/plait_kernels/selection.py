"""Chooses a backend for a device, by measurement if there are several candidates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from plait_kernels.backends import BACKENDS
from plait_kernels.errors import KernelError
from plait_kernels.synthetic import Shape, problem
from plait_kernels.timing import median_seconds


@dataclass(frozen=True)
class Selection:
    """The backend that was chosen, and the median seconds of those that were measured."""

    backend: str
    seconds: dict[str, float]


def choose_backend(
    device: torch.device | str, *, dtype: torch.dtype, features: int = 2048, tokens: int = 4096
) -> Selection:
    """The fastest backend that is right for a device.

    Plait's own have one candidate for each kind of device: `grouped` on a CPU, `triton` on a CUDA device,
    where tiles and the vendor's products are chosen for each layer (`autotuning`); where Triton does not run
    it is `grouped`, too. Several are timed, forward and backward of a square layer with four adapters of
    rank 16.

    Args:
        device: device of the model.
        dtype: the compute dtype.
        features: in and out of the layer that is timed.
        tokens: rows that are timed.
    """
    device = torch.device(device)
    candidates = [
        backend.name
        for backend in BACKENDS.values()
        if backend.deterministic and backend.candidate(device) and backend.runs(device, dtype)
    ]
    if len(candidates) <= 1:
        return Selection(candidates[0] if candidates else "grouped", {})
    made = problem(Shape(tokens, features, (features,), (16,) * 4), device=device, dtype=dtype)
    return fastest(candidates, lambda backend: median_seconds(partial(made.train, backend), device))


def fastest(backends: Sequence[str], measure: Callable[[str], float]) -> Selection:
    """The fastest backend; one that turns out not to run, for example without a C compiler, is left out.

    Args:
        backends: their names; the first always runs.
        measure: returns the seconds of a backend.
    """
    seconds = {backends[0]: measure(backends[0])}
    for backend in backends[1:]:
        try:
            seconds[backend] = measure(backend)
        except KernelError as refusal:
            warnings.warn(f"backend {backend!r} is left out: {refusal.value}", RuntimeWarning, stacklevel=3)
    return Selection(min(seconds, key=lambda name: seconds[name]), seconds)

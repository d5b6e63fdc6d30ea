"""The backends by name, and the choice of one for a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from plait_kernels import grouped, reference, triton_backend
from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall


class Backend(Protocol):
    """What a backend's module offers."""

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall
    ) -> tuple[Tensor, list[Tensor]]:
        """Output and what backward needs beside x."""

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        saved: list[Tensor],
        weight: Tensor,
        call: LayerCall,
        *,
        need_dx: bool,
    ) -> Tensor | None:
        """Add the gradients of A and B to the bank; return that of x where it is needed."""


BACKENDS: dict[str, Backend] = {"reference": reference, "grouped": grouped, "triton": triton_backend}


@dataclass(frozen=True)
class Selection:
    """The backend that was chosen, and the median seconds of those that were measured."""

    backend: str
    seconds: dict[str, float]


def check_backend(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise KernelError where a backend does not exist or cannot run on the device."""
    if backend not in BACKENDS:
        raise KernelError(f"backend {backend!r}", "a backend is one of those there are", ", ".join(BACKENDS))
    runs = triton_backend.available(device) and dtype != torch.float64
    if backend == "triton" and not runs:
        raise KernelError(
            f"backend 'triton' on {device} in {dtype}",
            "Triton needs its package, a CUDA device (or TRITON_INTERPRET=1, for tests) and no float64",
            "choose grouped, or auto",
        )


def choose_backend(
    device: torch.device | str, *, dtype: torch.dtype, features: int = 2048, tokens: int = 4096
) -> Selection:
    """The fastest backend that is right for a device.

    Only one is a candidate on a CPU. On a CUDA device `grouped` and `triton` are timed, forward and
    backward of a square layer with four adapters of rank 16.

    Args:
        device: where the model is.
        dtype: the compute dtype.
        features: in and out of the layer that is timed.
        tokens: rows that are timed.
    """
    from plait_kernels.synthetic import Shape, problem
    from plait_kernels.timing import median_seconds

    device = torch.device(device)
    if device.type != "cuda" or not triton_backend.available(device) or dtype == torch.float64:
        return Selection("grouped", {})
    made = problem(Shape(tokens, features, (features,), (16,) * 4), device=device, dtype=dtype)
    return fastest(
        ("grouped", "triton"), lambda backend: median_seconds(partial(made.train, backend), device)
    )


def fastest(backends: Sequence[str], measure: Callable[[str], float]) -> Selection:
    """The backend that takes least; one that cannot run after all, as without a C compiler, is left out.

    Args:
        backends: their names; the first always runs.
        measure: seconds of one.
    """
    seconds = {backends[0]: measure(backends[0])}
    for backend in backends[1:]:
        try:
            seconds[backend] = measure(backend)
        except KernelError as refusal:
            warnings.warn(f"backend {backend!r} is left out: {refusal.value}", RuntimeWarning, stacklevel=3)
    return Selection(min(seconds, key=lambda name: seconds[name]), seconds)

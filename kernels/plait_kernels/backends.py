"""The registry of backends: each module that implements one registers it, with what it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait_kernels.errors import KernelError
from plait_kernels.layer import LayerCall


class Forward(Protocol):
    """A backend's forward."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall, /
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the output and the tensors that backward needs in addition to x."""


class Backward(Protocol):
    """A backend's backward."""

    def __call__(
        self,
        grad: Tensor,
        x: Tensor,
        saved: list[Tensor],
        weight: Tensor,
        call: LayerCall,
        /,
        *,
        need_dx: bool,
    ) -> Tensor | None:
        """Add the adapters' gradients to the bank; return that of x if it is needed."""


def _everywhere(_device: torch.device, _dtype: torch.dtype) -> bool:
    return True


def _nowhere(_device: torch.device) -> bool:
    return False


@dataclass(frozen=True)
class Backend:
    """One way to compute the adapters' part of a layer.

    Args:
        name: the name by which it is chosen.
        forward, backward: the functions for one call of a layer.
        any_variant: whether it computes every variant; otherwise only plain LoRA, and rows of others go
            through `reference`.
        deterministic: whether two runs are bit-equal. Only such a backend is chosen automatically.
        runs: whether it runs on a device in a dtype.
        needs: what it needs to run, in words.
        candidate: whether `choose_backend` may take it on a device.
    """

    name: str
    forward: Forward
    backward: Backward
    any_variant: bool = False
    deterministic: bool = True
    runs: Callable[[torch.device, torch.dtype], bool] = _everywhere
    needs: str = ""
    candidate: Callable[[torch.device], bool] = _nowhere


BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Add a backend to the registry, replacing an earlier one with its name."""
    BACKENDS[backend.name] = backend
    return backend


def find_backend(name: str) -> Backend:
    """The backend with this name; KernelError lists the existing ones."""
    if name not in BACKENDS:
        raise KernelError(f"backend {name!r}", "there is no such backend", ", ".join(BACKENDS))
    return BACKENDS[name]


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend with this name; KernelError if there is none, or it does not run on the device in this
    dtype."""
    backend = find_backend(name)
    if not backend.runs(device, dtype):
        raise KernelError(
            f"backend {name!r} on {device} in {dtype}", backend.needs, "choose grouped, or auto"
        )
    return backend

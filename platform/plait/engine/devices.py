"""Which device and which kernels: what the settings name, or what is found."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from plait.errors import ConfigError
from plait_kernels import KernelError, choose_backend
from plait_kernels.backends import check_backend


def choose_device(device: str) -> torch.device:
    """The device named by ``engine.device``: "auto" takes a GPU where there is one.

    Raises:
        ConfigError: "cuda" where there is none.
    """
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("engine.device='cuda'", "There is no CUDA device.", "Give engine.device=cpu.")
    return torch.device("cuda" if device != "cpu" and there else "cpu")


def choose_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend named by ``engine.kernels``: "auto" takes the fastest that is right for the device.

    Raises:
        ConfigError: the backend does not run there.
    """
    if kernels == "auto":
        return choose_backend(device, dtype=dtype).backend
    try:
        check_backend(kernels, device, dtype)
    except KernelError as error:
        raise ConfigError(
            f"engine.kernels={kernels!r}: {error.value}", f"{error.rule}.", "Give engine.kernels=auto."
        ) from error
    return kernels


@cache
def device_kind(device: str) -> str:
    """What "cpu" or "cuda" is here: the name of the processor or of the GPU."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "cpu")

"""A device that is not there: Triton compiles for it and goes through all of a launch but the driver's call.

A seam: benchmarks and tests measure and check with it what needs no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from plait_kernels.launching import on_meta

Launched = Callable[..., None]


def _nothing(*_launched: object) -> None:
    pass


class _Utils:
    """What Triton's driver knows of a device and its binaries."""

    def __init__(self) -> None:
        self._binaries: dict[bytes, int] = {}

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**31 - 1}  # who asks compares with what real devices have

    def load_binary(self, _name: str, binary: bytes, _shared: int, _device: int) -> tuple[int, ...]:
        number = self._binaries.setdefault(binary, 1 + len(self._binaries))
        return number, number, 0, 0, 1024

    def unload_module(self, _module: int) -> None:
        pass


class AbsentDevice:
    """As much of a driver of Triton as a launch needs.

    Args:
        capability: as 90 for compute capability 9.0.
        launched: called with what the driver would be: grid, stream, number of the binary, its metadata,
            three of Triton's hooks, the kernel's arguments.
    """

    def __init__(self, capability: int, launched: Launched = _nothing) -> None:
        self.capability = capability
        self.utils = _Utils()
        self._launched = launched

    def launcher_cls(self, _source: object, _metadata: object) -> Launched:
        """Launches a binary."""
        return self._launched

    def get_current_device(self) -> int:
        """Its number; binaries are kept by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """A stream's number."""
        return device

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def absent(capability: int) -> Iterator[None]:
    """Have launches on meta tensors go to a device that is not there."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(AbsentDevice(capability))
    try:
        with on_meta():
            yield
    finally:
        driver._active = before

"""Peak memory of a stretch of work, where the device can tell."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMeter:
    """Peak bytes between :meth:`start` and :meth:`stop`.

    On CUDA the allocator's own peak. On Linux the highest resident size of this process, which counts
    whatever else lives in it; elsewhere None.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tells = True

    def start(self) -> None:
        """Forget earlier peaks."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_text("5")  # proc(5): resets the highest resident size
        except OSError:
            self._tells = False

    def stop(self) -> int | None:
        """The peak since the start."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._tells:
            return None
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None


def device_bytes(device: torch.device) -> int:
    """Memory that this process may count on: all of a GPU; on a CPU what is free and what it has already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)

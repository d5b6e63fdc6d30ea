"""What running out of memory looks like on each device."""

from __future__ import annotations

import torch

# The CPU's allocator raises a plain RuntimeError, known by its words alone.
_WORDS = ("can't allocate memory", "not enough memory")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the device, or the host, has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def give_back(device: torch.device) -> None:
    """Let the device's allocator return what it keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

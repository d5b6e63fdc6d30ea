"""What running out of memory looks like on each device, and what is left of an attempt that did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

# Known by their words alone: the CPU's allocator, CUDA where it is not torch's own allocator that finds no
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
    """What an action gives, and None; or None, and the first line that said that memory had run out.

    By then the error is gone, whose traceback would keep alive what the action had made.

    Raises:
        Exception: the action's, where it is another one.
    """
    try:
        return action(), None
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return None, str(error).partition("\n")[0] or type(error).__name__


def give_back(device: torch.device) -> None:
    """Let the device's allocator return what it keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

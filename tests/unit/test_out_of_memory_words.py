"""What counts as running out of memory, and that nothing of an attempt which did is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from plait.core.errors import CheckpointError
from plait.engine.memory import attempt, ran_out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception) -> None:
    assert ran_out(error)


def test_others_do_not() -> None:
    assert not ran_out(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not ran_out(CheckpointError("checkpoint.json is not as it was written"))
    assert not ran_out(ValueError("not enough memory"))


def test_an_attempt_leaves_nothing_behind() -> None:
    """The error's traceback would keep its activations, for which there is no room."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def action() -> None:
        made = torch.zeros(3)
        seen.append(weakref.ref(made))
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB\nand more")

    gc.disable()
    try:
        assert attempt(action) == (None, "tried to allocate 20.00 GiB")
        assert seen[0]() is None
    finally:
        gc.enable()
    assert attempt(lambda: 7) == (7, None)
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)

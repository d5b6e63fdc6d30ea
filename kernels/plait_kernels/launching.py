"""The one place from which Triton kernels, and the products beside them, are launched.

So launches can be counted without a device, and cost the host on meta tensors what they cost on a device: the
meta kernel of torch's `addmm` is a decomposition in Python that takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Note = Callable[[Any, tuple[object, ...]], None]
_notes: list[Note] = []
_absent: list[None] = []  # not empty: Triton is asked on meta tensors, too
GIVEN: Any = object()  # stands for an argument of a `Launch` that each call gives
_ALIGNMENT = 16  # bytes; of whether an address is a multiple of it Triton makes binaries of their own


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> Any:
    """Launch a kernel on the device of its first argument, a tensor; what Triton compiled for it.

    On meta tensors it does nothing, as operators do.
    """
    for note in _notes:
        note(kernel, arguments)
    first = arguments[0]
    if not isinstance(first, Tensor) or not first.is_meta or _absent:
        # Versions of Triton differ in the default of `enable_fp_fusion`, on which bits depend.
        return _on_device(first, lambda: kernel[grid](*arguments, enable_fp_fusion=True, **constants))
    return None


def _on_device(first: object, run: Callable[[], Any]) -> Any:
    """Triton launches on the current device, which another one's tensors are not on."""
    if isinstance(first, Tensor) and first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            return run()
    return run()


class Launch:
    """A launch that is asked for again and again, with other tensors in some places and all else the same.

    Triton looks at every argument of every launch to find its binary, which takes the host longer than all
    the rest. Here it does so once; then the binary is asked directly.

    Args:
        arguments: as for :func:`launch`, with `GIVEN` for tensors that each call gives. Their dtypes must
            always be the same, and so must the device.
    """

    __slots__ = ("_arguments", "_constants", "_grid", "_kernel", "_places", "_ready", "_run")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        self._kernel, self._grid, self._arguments, self._constants = kernel, grid, arguments, constants
        self._places = [place for place, each in enumerate(arguments, _BEFORE) if each is GIVEN]
        self._ready: list[Any] = []  # what the binary is called with
        self._run: _Binary | None = None

    def __call__(self, *given: Tensor) -> None:
        """Launch; all tensors are on the same device."""
        binary = self._run
        if binary is None or _notes:
            self._through_triton(given)
            return
        arguments, joined = self._ready.copy(), 0
        # As many as the first time, when they were counted: to count them takes a fifth of a launch.
        for place, tensor in zip(self._places, given):  # noqa: B905
            arguments[place] = address = tensor.data_ptr()
            joined |= address
        first, device = given[0], binary.device()
        elsewhere = first.get_device() != device if first.is_cuda else first.is_meta and not _absent
        if elsewhere or joined % _ALIGNMENT or binary.hooked():
            self._through_triton(given)
            return
        arguments[_STREAM] = binary.stream(device)
        binary.run(*arguments)

    def _through_triton(self, given: tuple[Tensor, ...]) -> None:
        if given[0].is_meta and not _absent and not _notes:
            return
        arguments = list(self._arguments)
        for place, tensor in zip(self._places, given, strict=True):
            arguments[place - _BEFORE] = tensor
        compiled = launch(self._kernel, self._grid, *arguments, **self._constants)
        # The interpreter compiles nothing; elsewhere than on CUDA binaries differ by more than alignment.
        if self._run is not None or compiled is None or compiled.metadata.target.backend != "cuda":
            return
        if all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in given):
            names = self._kernel.arg_names[len(arguments) :]
            grid = (*self._grid, 1, 1)[:3]
            self._ready = [*grid, 0, compiled.function, compiled.packed_metadata, None, None, None]
            self._ready += [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
            self._ready += [self._constants[name] for name in names]
            self._run = _Binary(compiled)


_STREAM, _BEFORE = 3, 9  # where the stream is among what a binary is called with; how many are not its own


@cache
def _triton() -> tuple[Any, Any]:
    """Triton's settings of launches, and its driver."""
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, driver


class _Binary:
    """What launches a binary as Triton itself does; with a profiler's hooks Triton is to do it."""

    __slots__ = ("compiled", "device", "hooks", "run", "stream")

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled  # which unloads the binary when it is let go
        self.run = compiled.run
        self.hooks, driver = _triton()
        active = driver.active
        self.device, self.stream = active.get_current_device, active.get_current_stream

    def hooked(self) -> bool:
        """Whether a hook does anything: it is a list of calls, or may be one or None."""
        enter, leave = self.hooks.launch_enter_hook, self.hooks.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def room(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of a shape, else like another. Torch's `new_empty` of meta tensors is in Python, and it
    reads sizes that are arguments of their own in half of the time."""
    return torch.empty(*shape, dtype=dtype or like.dtype, device=like.device)


class _AddProduct:
    arg_names = ("out_", "x", "matrix")


def add_product(out: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """out += x M by the vendor's library."""
    for note in _notes:
        note(_AddProduct, (out, x, matrix))
    return out if out.is_meta else out.addmm_(x, matrix)


class _Product:
    arg_names = ("out", "x", "matrix")


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x M + b by the vendor's library."""
    if _notes or x.is_meta:
        out = room(x, (x.shape[0], matrix.shape[1]))
        for note in _notes:
            note(_Product, (out, x, matrix))
        if x.is_meta:
            return out
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)


@contextmanager
def noted(note: Note) -> Iterator[None]:
    """Call ``note`` with the kernel and the arguments of each launch."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


@contextmanager
def on_meta() -> Iterator[None]:
    """Ask Triton for launches on meta tensors, too, where its driver launches nothing."""
    _absent.append(None)
    try:
        yield
    finally:
        _absent.pop()

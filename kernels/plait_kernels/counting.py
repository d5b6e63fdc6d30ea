"""What a device would be asked to do: launches, bytes, uploads and synchronisations, counted on meta tensors.

Meta tensors stand for the device's, tensors of the CPU for the host's. Every operator that is not a view
counts as one launch that reads its inputs and writes its outputs once; a Triton kernel moves each tensor
argument once, and one that it changes in place (its name ends with an underscore) twice. A library may need
several kernels for an operator, and what a kernel reaches through a table of addresses is not seen, so the
counts are lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait_kernels.launching import noted

_FREE = ("empty", "new_empty", "lift_fresh", "detach", "_unsafe_view")  # no work
_PICKS = ("index_select", "embedding", "gather", "index")  # read only what they return
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")


@dataclass
class Counts:
    """What was counted so far.

    `launches` of operators and kernels, `bytes` that they move, `uploads` from the host, and `waits`: times
    that the host waits for the device, among them every upload that is not queued.
    """

    launches: int = 0
    bytes: int = 0
    uploads: int = 0
    waits: int = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what is done on meta tensors inside; a value asked of one is 1."""
    counts = Counts()

    def note(kernel: Any, arguments: tuple[object, ...]) -> None:
        counts.launches += 1
        for name, value in zip(kernel.arg_names, arguments, strict=False):
            if isinstance(value, Tensor):
                counts.bytes += _size(value) * (2 if name.endswith("_") else 1)

    with noted(note), _Operators(counts):
        yield counts


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        device = [tensor for tensor in given if tensor.is_meta]
        if device and name == "_local_scalar_dense":
            self.counts.waits += 1
            return 1
        if device and name == "_to_copy" and str(kwargs.get("device", "meta")) == "cpu":
            self.counts.waits += not kwargs.get("non_blocking")
            return torch.ones(device[0].shape, dtype=kwargs.get("dtype") or device[0].dtype)
        out = func(*args, **kwargs)
        made = [tensor for tensor in _tensors((out,)) if tensor.is_meta]
        if not made or func.is_view or name.startswith(_FREE):
            return out
        if name in ("_to_copy", "copy_") and any(not tensor.is_meta for tensor in given):
            self.counts.uploads += 1
            self.counts.waits += not (kwargs.get("non_blocking") or args[-1] is True)
            return out
        self.counts.launches += 1
        self.counts.waits += name in _WAITS
        written = sum(_size(tensor) for tensor in made)
        read = written if name in _PICKS else sum(_size(tensor) for tensor in device)
        self.counts.bytes += written + read
        return out


def _tensors(values: Sequence[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _size(tensor: Tensor) -> int:
    """Bytes that a pass over the tensor moves; what is expanded is not read again."""
    own = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        own *= size if stride else 1
    return own * tensor.element_size()

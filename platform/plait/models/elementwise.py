"""Norms, gates, rotation and softmax in one pass over memory each.

Transformers' own modules take as long as the matrix products, because they write every intermediate. The
functions here compute the same with one read and one write, forward and backward: by Triton with the backend
``triton``, compiled on a CPU (``elementwise.c``), and elsewhere in plain torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from plait_kernels import passes, plain
from plait_kernels.chain import apply
from plait_kernels.compiled import load_library

MOST_KEYS = 512  # limit of the compiled softmax: KEYS in elementwise.c
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _LONG, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "rms": [_POINTER] * 4 + [_LONG, _LONG, _REAL, _REAL, _INT],
    "rms_back": [_POINTER] * 5 + [_LONG, _LONG, _REAL, _INT],
    "gated": [_POINTER] * 2 + [_LONG, _LONG, _INT, _INT],
    "gated_back": [_POINTER] * 3 + [_LONG, _LONG, _INT, _INT],
    "rotate": [_POINTER] * 3 + [_LONG] * 6 + [_REAL, _INT],
    "softmax": [_POINTER, _LONG, _LONG, _LONG, _LONG, _REAL, _INT],
    "softmax_back": [_POINTER] * 2 + [_LONG, _LONG, _LONG, _LONG, _REAL, _INT],
    "keep": [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER],
    "attend": [_POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _INT],
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_suffix(".c"), "the model runs in plain torch, which is slower")
    if library is None:
        return None
    for name, arguments in _ARGUMENTS.items():
        for suffix in _SUFFIX.values():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes = arguments
            function.restype = _INT if name == "attend" else None
    return library


def compiled(name: str, *tensors: Tensor) -> Callable[..., None] | None:
    """The compiled function for these tensors; None unless they are contiguous and on a CPU."""
    first = tensors[0]
    fits = all(
        tensor.device.type == "cpu" and tensor.dtype == first.dtype and tensor.is_contiguous()
        for tensor in tensors
    )
    library = _library() if fits and first.dtype in _SUFFIX else None
    if library is None:
        return None
    return cast("Callable[..., None]", getattr(library, f"{name}_{_SUFFIX[first.dtype]}"))


@dataclass(frozen=True, slots=True, eq=False)
class FrozenNorm:
    """An RMSNorm x / rms(x) · (offset + weight) over the last dimension or, ``centred``, a LayerNorm.

    Attributes:
        weight, bias: (features,); only a LayerNorm may have a bias.
        offset: 0 as in Llama, where the quotient is rounded to x's dtype before the product, or 1 as in
            Gemma.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0
    bias: Tensor | None = None
    centred: bool = False

    def __call__(self, x: Tensor, *, backend: str = "") -> Tensor:
        """The norm of x; ``backend`` is that of the model's kernels."""
        return self.of_sum(x, None, backend=backend)[0]

    def of_sum(self, x: Tensor, added: Tensor | None, *, backend: str = "") -> tuple[Tensor, Tensor]:
        """The norm of x + ``added``, and this sum; without ``added``, x.

        What needs the sum takes it from here, so that both gradients are added in the norm's backward.
        """
        found: tuple[Tensor, Tensor] = apply(SumNorm, x, added, self, backend)
        return found

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        """The norm of x without Triton, and what backward needs of each row."""
        if self.centred:
            return plain.layer_norm(x, self.weight, self.bias, self.eps, self.offset)
        function = compiled("rms", x, self.weight)
        if function is None:
            return plain.rms(x, self.weight, self.eps, self.offset)
        features = x.shape[-1]
        out, scale = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
        pointers = (tensor.data_ptr() for tensor in (out, scale, x, self.weight))
        rows = x.numel() // features
        function(*pointers, rows, features, self.eps, self.offset, torch.get_num_threads())
        return out, scale

    def backward(self, grad: Tensor, x: Tensor, found: Sequence[Tensor]) -> Tensor:
        """The gradient of x without Triton."""
        if self.centred:
            mean, scale = found
            return plain.layer_norm_back(grad, x, self.weight, self.offset, mean, scale)
        (scale,) = found
        function = compiled("rms_back", grad, x, self.weight)
        if function is None:
            return plain.rms_back(grad, x, self.weight, scale, self.offset)
        dx, features = torch.empty_like(x), x.shape[-1]
        pointers = (tensor.data_ptr() for tensor in (dx, grad, scale, x, self.weight))
        function(*pointers, x.numel() // features, features, self.offset, torch.get_num_threads())
        return dx


class SumNorm(torch.autograd.Function):
    """The norm of a sum, and the sum; its gradient is that of both terms."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, norm: FrozenNorm, backend: str
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`FrozenNorm.of_sum`."""
        x = x.contiguous()
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.two = norm, added is not None
        ctx.triton = passes.by_triton(backend, x) and x.shape[-1] <= passes.WIDEST
        if ctx.triton:
            added = None if added is None else added.contiguous()
            given = (x, norm.weight, norm.eps, norm.offset, added)
            out, *found, total = passes.rms(*given, bias=norm.bias, centred=norm.centred)
        else:
            total = x if added is None else x + added
            out, *found = norm.forward(total)
        ctx.save_for_backward(total, *found)
        return out, total

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, more: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Given the gradients of norm and sum."""
        total, *found = ctx.saved_tensors
        norm: FrozenNorm = ctx.norm
        if grad is None:
            dx = more
        elif ctx.triton:
            more = None if more is None else more.contiguous()
            given = (grad.contiguous(), total, norm.weight, *found, norm.offset, more)
            dx = passes.rms_back(*given, centred=norm.centred)
        else:
            dx = norm.backward(grad.contiguous(), total, found)
            dx = dx if more is None else dx.add_(more)
        return dx, dx if ctx.two else None, None, None


def activated(x: Tensor, kind: int, *, backend: str = "") -> Tensor:
    """act(x), one of `plain`'s kinds; ``backend`` is that of the model's kernels."""
    return cast("Tensor", apply(_Activated, x, kind, backend))


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int, backend: str) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kind, ctx.triton = kind, passes.by_triton(backend, x)
        return passes.activated(x, kind) if ctx.triton else plain.activation(x, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        back = passes.activated_back if ctx.triton else plain.activation_back
        return back(grad.contiguous(), x, ctx.kind), None, None


def gated(x: Tensor, kind: int, *, backend: str = "") -> Tensor:
    """act(gate) · up, for gate and up side by side: (..., 2n) to (..., n); act is SILU or GELU_TANH.

    ``backend`` is that of the model's kernels.
    """
    return cast("Tensor", apply(_Gated, x, kind, backend))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int, backend: str) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kind, ctx.triton = kind, passes.by_triton(backend, x)
        if ctx.triton:
            return passes.gated(x, kind)
        function = compiled("gated", x)
        if function is None:
            return plain.gated(x, kind)
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        function(out.data_ptr(), x.data_ptr(), out.numel() // width, width, kind, torch.get_num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        grad, width = grad.contiguous(), grad.shape[-1]
        if ctx.triton:
            return passes.gated_back(grad, x, ctx.kind), None, None
        function = compiled("gated_back", x, grad)
        if function is None:
            return plain.gated_back(grad, x, ctx.kind), None, None
        dx = torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (dx, grad, x))
        function(*pointers, grad.numel() // width, width, ctx.kind, torch.get_num_threads())
        return dx, None, None


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, length: int, *, back: bool = False) -> None:
    """Rotate in place (RoPE): the first half of the rotated features against the second.

    Args:
        x: (rows, size), contiguous; row r is at position r mod ``length``.
        cos, sin: (at least ``length``, rotated size), contiguous.
        back: rotate the other way, which is the inverse and the gradient.
    """
    sign, half = (-1.0 if back else 1.0), cos.shape[-1] // 2
    function = compiled("rotate", x, cos, sin)
    if function is not None:
        pointers = (tensor.data_ptr() for tensor in (x, cos, sin))
        size = x.shape[-1]
        function(*pointers, len(x), length, 1, size, size, half, sign, torch.get_num_threads())
        return
    view = x.view(-1, length, x.shape[-1]).transpose(0, 1)
    plain.rotate_(view, cos[:length], sin[:length], back=back)


def rotate_heads_(x: Tensor, turned: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first ``turned`` heads of each row in place.

    Args:
        x: (rows, heads, size), contiguous.
        cos, sin: (rows, rotated size), contiguous, those of each row.
    """
    function = compiled("rotate", x, cos, sin)
    if function is None:
        plain.rotate_(x[:, :turned], cos, sin)
        return
    rows, heads, size = x.shape
    pointers = (tensor.data_ptr() for tensor in (x, cos, sin))
    half = cos.shape[-1] // 2
    function(*pointers, rows, rows, turned, heads * size, size, half, 1.0, torch.get_num_threads())


def rotated_merged(
    qkv: Tensor, turned: tuple[int, int], position_embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """Rotate the first of all heads of each row of a merged product in place, by Triton.

    Its gradient is rotated back in place, too: it must come from attention alone, which makes a new one.

    Args:
        turned: how many heads, of how many.
        position_embeddings: cos and sin of each row, (1, rows, rotated size).
    """
    out: Tensor = apply(_RotatedMerged, qkv, turned, *position_embeddings)
    return out


class _RotatedMerged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turned: tuple[int, int], cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.turned, ctx.tables = turned, (cos, sin)
        ctx.mark_dirty(qkv)
        passes.rotate_(_heads(qkv, turned), cos, sin)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.contiguous()
        passes.rotate_(_heads(grad, ctx.turned), *ctx.tables, back=True)
        return grad, None, None, None


def _heads(qkv: Tensor, turned: tuple[int, int]) -> Tensor:
    """The first of all heads, as a view: (rows, turned, size). Each row is contiguous."""
    first, total = turned
    rows, width = qkv.shape
    size = width // total
    return qkv.as_strided((rows, first, size), (qkv.stride(0), size, 1))


def causal_softmax_(scores: Tensor, length: int, window: int | None, scale: float) -> bool:
    """Softmax of scale · scores in place; row r sees keys up to r mod ``length``, at most ``window`` of them.

    Args:
        scores: (batch, rows, keys), contiguous, at most ``MOST_KEYS`` keys, which start at position 0.
        window: number of keys that a query sees, including its own; None: all.

    Returns:
        Whether it was done; if not, the scores are unchanged and the caller must use torch.
    """
    function = compiled("softmax", scores) if scores.shape[-1] <= MOST_KEYS else None
    if function is None:
        return False
    keys = scores.shape[-1]
    rows = scores.numel() // keys
    function(scores.data_ptr(), rows, length, keys, window or keys, scale, torch.get_num_threads())
    return True


def causal_softmax_back_(
    grad: Tensor, probabilities: Tensor, length: int, window: int | None, scale: float
) -> bool:
    """Turn the gradient of the probabilities into that of the scores, in place; see `causal_softmax_`."""
    function = compiled("softmax_back", grad, probabilities) if grad.shape[-1] <= MOST_KEYS else None
    if function is None:
        return False
    keys = grad.shape[-1]
    pointers = (grad.data_ptr(), probabilities.data_ptr())
    rows = grad.numel() // keys
    function(*pointers, rows, length, keys, window or keys, scale, torch.get_num_threads())
    return True


class PagesShape(ctypes.Structure):
    """How keys and values lie in pages, and the rule of attention over them: ``struct pages``."""

    _fields_ = (
        *((name, _LONG) for name in ("tokens", "stride", "shared", "group", "size", "window")),
        *((name, _REAL) for name in ("scale", "cap")),
    )


def store_pages(qkv: Tensor, pool: Tensor, places: Tensor, queries: int, shape: PagesShape) -> bool:
    """``plait_kernels.paged.store_rows`` by compiled code; whether it runs here.

    Args:
        queries: query heads, which come first.
    """
    function = compiled("keep", pool, qkv)
    if function is None:
        return False
    function(
        *(qkv.data_ptr(), qkv.stride(0), queries * shape.size, pool.data_ptr()),
        *(places.data_ptr(), len(places), ctypes.addressof(shape)),
    )
    return True


def attend_pages(
    out: Tensor, qkv: Tensor, pool: Tensor, tables: Tensor, rows: Tensor, shape: PagesShape
) -> None:
    """Attention of rows over keys and values in pages, by compiled code: ``compiled("attend", pool)``.

    Args:
        out: (tokens, query heads · size), of which the rows are filled.
        qkv: (tokens, …), beginning with the query heads.
        pool: (pages, elements).
        tables: (requests, longest) int64, the pages of each request.
        rows: (n, 3) int64: row of ``out`` and ``qkv``, its request among the tables, its position.
    """
    function = compiled("attend", pool, out, qkv)
    if function is None:
        raise ValueError("attention over pages needs compiled code, and contiguous tensors of one dtype")
    failed = function(
        *(out.data_ptr(), out.stride(0), qkv.data_ptr(), qkv.stride(0), pool.data_ptr()),
        *(tables.data_ptr(), tables.shape[1], rows.data_ptr(), len(rows)),
        *(ctypes.addressof(shape), torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("no memory for attention over pages")

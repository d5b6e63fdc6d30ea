"""Lets Triton's interpreter leave out what it does again and again, or whose result it drops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def compute_only_what_counts() -> None:
    """Have it add, subtract and multiply integers once.

    It does so again in 64 bits, to look for overflows of which it tells nobody: that its ``device_assert``
    does in debugging alone, which it cannot be asked for.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def describe_once() -> None:
    """Have it make the shape of tensors, and look for NumPy's type of each of Triton's, once for all that are
    alike: it makes a dozen objects for each number that a kernel computes."""
    find = cache(interpreter._get_np_dtype)

    def find_scalar(dtype: Any) -> Any:
        scalar = dtype.scalar
        return find(tl.uint64 if scalar.is_ptr() else scalar)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def describe(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values) if type.is_block() else ())

    interpreter._get_np_dtype = find_scalar
    tl.tensor.__init__ = describe


def prepare_once() -> None:
    """Have a function that a kernel calls use what its launch has put in place.

    The interpreter replaces some 400 functions of ``triton.language`` at each launch, and looks for what is
    still to replace at each call within it. There is nothing after the first call for each module.
    """
    place, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    placed = set[frozenset[str]]()

    @cache
    def languages(function: Callable[..., Any]) -> frozenset[str]:
        named = (tl, tl.core)
        seen = list(function.__globals__.values())
        return frozenset(each.__name__ for each in named if any(each is value for value in seen))

    def place_new(function: Callable[..., Any]) -> Any:
        if languages(function) in placed:
            return interpreter._LangPatchScope()
        placed.add(languages(function))
        return place(function)

    def launch_anew(self: Any, *given: Any, **named: Any) -> None:
        placed.clear()
        try:
            launch(self, *given, **named)
        finally:
            placed.clear()

    interpreter._patch_lang = place_new
    interpreter.GridExecutor.__call__ = launch_anew

"""Lets Triton's interpreter prepare its language once a launch, and not for each function of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


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

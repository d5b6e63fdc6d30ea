"""Keeps transformers' progress bars off the terminal, which belongs to Plait."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging

_bars: Any = logging  # whose functions for bars have no types


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside: no progress bars, and no warnings of what will change in libraries that Plait calls."""
    bars = _bars.is_progress_bar_enabled()
    _bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if bars:
            _bars.enable_progress_bar()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """As :func:`quiet`, also where transformers draws bars without asking: it reads GGUF files so."""
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        yield


def say(text: str) -> None:
    """One line about something that takes long, at once and beside the output proper."""
    print(text, file=sys.stderr, flush=True)

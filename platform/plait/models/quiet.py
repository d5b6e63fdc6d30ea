"""Keeps transformers' progress bars off the terminal, which belongs to Plait."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging as transformers_logging

_RETRIES = re.compile("thrown while requesting|^Retrying in")
_bars: Any = transformers_logging  # whose functions for bars have no types


class _HubWarnings(logging.Handler):
    """Says of all attempts to reach the hub once that they go on; whatever else it warns of is passed on."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        """One line at most for the attempts."""
        text = record.getMessage()
        if not _RETRIES.search(text):
            say(text)
        elif not self._told:
            self._told = True
            say("The model hub does not answer; it is asked some more times, for half a minute in all.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside: no progress bars, no warnings of what will change in libraries that Plait calls, and one line
    where the hub does not answer and is asked again."""
    bars = _bars.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    handlers, propagate = hub.handlers, hub.propagate
    hub.handlers, hub.propagate = [_HubWarnings(logging.WARNING)], False
    _bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        hub.handlers, hub.propagate = handlers, propagate
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

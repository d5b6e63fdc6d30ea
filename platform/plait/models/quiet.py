"""Keeps transformers' progress bars and repeated warnings off the terminal."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

from plait.utils.progress import say

_RETRIES = re.compile("thrown while requesting|^Retrying in")


class _HubWarnings(logging.Handler):
    """Prints one line for all retries of the model hub, and every other warning unchanged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, but of retries only the first."""
        text = record.getMessage()
        if not _RETRIES.search(text):
            say(text)
        elif not self._said:
            self._said = True
            say("The model hub does not answer; retrying for up to half a minute.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and deprecation warnings of libraries, and print one line for all retries of the
    hub."""
    from transformers.utils import logging as transformers_logging  # slow to import

    library: Any = transformers_logging  # its functions for progress bars have no types
    bars = library.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    handlers, propagate = hub.handlers, hub.propagate
    hub.handlers, hub.propagate = [_HubWarnings(logging.WARNING)], False
    library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        hub.handlers, hub.propagate = handlers, propagate
        if bars:
            library.enable_progress_bar()

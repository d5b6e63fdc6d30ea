"""Plait: train many LoRA adapters at once over one frozen base model.

From Python: ``plait.sweep(overrides)`` runs a search, ``plait.open(name)`` opens one that ran before.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from plait.core.errors import PlaitError
from plait.core.version import __version__

if TYPE_CHECKING:
    from plait.api import Adapter, Interrupted, Result, open, sweep

__all__ = ["Adapter", "Interrupted", "PlaitError", "Result", "__version__", "open", "sweep"]


def __getattr__(name: str) -> object:
    """Names of ``plait.api``, imported when first used, because the command line needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("plait.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

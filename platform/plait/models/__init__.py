"""The frozen base model: loading it, running it as blocks, and the layers that adapters may target.

Names are imported when they are first used, so that checking targets needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.models.base import BaseModel, HeadParameters, Identity
    from plait.models.context import MicrobatchContext
    from plait.models.load import ModelShape, inspect_model, load_model, load_tokeniser, transformers_model
    from plait.models.targets import LinearInfo, check_rank, resolve_targets

__all__ = [
    "BaseModel",
    "HeadParameters",
    "Identity",
    "LinearInfo",
    "MicrobatchContext",
    "ModelShape",
    "check_rank",
    "inspect_model",
    "load_model",
    "load_tokeniser",
    "resolve_targets",
    "transformers_model",
]

_HOMES = {
    "base": ("BaseModel", "HeadParameters", "Identity"),
    "context": ("MicrobatchContext",),
    "load": ("ModelShape", "inspect_model", "load_model", "load_tokeniser", "transformers_model"),
    "targets": ("LinearInfo", "check_rank", "resolve_targets"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"plait.models.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The frozen base model: loading, running it as blocks, and which layers adapters may target."""

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

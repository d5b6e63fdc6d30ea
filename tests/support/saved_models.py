"""Tiny models on disk, in several safetensors."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from plait.core.settings import ModelSettings
from plait.models.load import transformers_model
from plait.models.tiny import byte_tokeniser


def saved(settings: ModelSettings, folder: Path, model: PreTrainedModel | None = None) -> ModelSettings:
    """The settings of a tiny model, or of another, once it is in a folder."""
    found = transformers_model(settings, cache=folder) if model is None else model
    found.save_pretrained(folder, max_shard_size="150KB")
    byte_tokeniser().save_pretrained(folder)
    return ModelSettings(kind="hf", id=str(folder), dtype=settings.dtype)

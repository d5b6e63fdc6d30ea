"""What a search has trained: its adapters' folders, the base model that they belong to, the settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from plait.adapters.facts import CONFIG, WEIGHTS
from plait.config.fields import build
from plait.core.errors import ConfigError, StorageError
from plait.core.plans import recorded_choices
from plait.core.settings import AUTO, ModelSettings, TrackingSettings
from plait.data.tokenising import read_template
from plait.engine.build import PLAN_FILE
from plait.tracking import results
from plait.tracking.leaderboard import JobRecord
from plait.tracking.names import CONFIG_FILE
from plait.tracking.results import SearchResult
from plait.utils.files import keep_newest

OTHER_CACHE = "Make Plait's cache writable, or name another folder for it: PLAIT_CACHE."
MOST_FETCHED = 100  # adapters in the cache
IN_USE = 86_400.0  # seconds for which what a command has fetched stays, whatever the number


def adapter_folder(search: SearchResult, record: JobRecord, settings: TrackingSettings) -> Path:
    """The PEFT folder of a trial; the first call fetches it from the store.

    Raises:
        SearchError: the trial has no adapter.
        StorageError: the store does not answer, or the disk is full.
    """
    if not record.run_id:  # read from the study, which has no runs, because the store was down
        folder = Path(record.adapter)
        if record.adapter and folder.is_dir():
            return folder
        raise StorageError(
            f"{record.name} of search {search.name!r} ({record.state}): no adapter in its folder",
            "The search was opened while its store did not answer, so no adapter can be fetched.",
            f"Open it again when the store answers: {results.opening(search.name, settings)}.",
        )
    # Not the folder that the trial wrote: a search of this name that was restarted writes there, too.
    fetched = results.fetched_folder(record.run_id)
    if fetched.is_dir() and not _readable(fetched):  # not one that another process has just fetched
        shutil.rmtree(fetched, ignore_errors=True)
    if not fetched.is_dir():
        try:
            results.export(settings, record.run_id, fetched, remedy=OTHER_CACHE)
        except StorageError:
            if not _readable(fetched):  # else another process was faster
                raise
        keep_newest(fetched.parent, MOST_FETCHED, IN_USE)
    with suppress(OSError):
        os.utime(fetched)  # it was used just now
    return fetched


def _readable(folder: Path) -> bool:
    """Whether there is an adapter in a folder whose files are neither cut off nor of another kind."""
    try:
        json.loads((folder / CONFIG).read_bytes())
        with safe_open(folder / WEIGHTS, "np"):
            return True
    except (OSError, ValueError, SafetensorError):
        return False


def recorded_config(search: SearchResult, settings: TrackingSettings) -> Mapping[str, Any]:
    """The settings of a search as its run in the store has them; those that trials vary have base values.

    Raises:
        StorageError: the store does not have them, or does not answer.
    """
    loaded: Mapping[str, Any] = yaml.safe_load(results.recorded_text(search, settings, CONFIG_FILE))
    return loaded


def own_template(config: Mapping[str, Any]) -> str | None:
    """The chat template that a search names; None: its rows were rendered with the tokeniser's, or without.

    Raises:
        ConfigError: its file cannot be read.
    """
    given = config.get("data", {}).get("chat_template")
    try:
        return None if given is None else read_template(given)
    except ConfigError as error:
        remedy = "Put the file with which the search was trained there, or run this where it is."
        raise ConfigError(error.value, error.rule, remedy) from error


def base_model(search: SearchResult, settings: TrackingSettings) -> ModelSettings:
    """The base model as the search trained on it, with the dtype that "auto" meant.

    Raises:
        StorageError: as :func:`recorded_config`.
    """
    found = build(ModelSettings, recorded_config(search, settings)["model"], "model")
    if found.dtype != AUTO:
        return found
    choices = recorded_choices(results.recorded_text(search, settings, PLAN_FILE)) or {}
    return replace(found, dtype=str(choices.get("dtype", "float32")))

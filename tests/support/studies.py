"""Studies of made-up searches, made as a search makes its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optuna.storages import BaseStorage, InMemoryStorage

from plait.config.overrides import read_request
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings, SearchSettings
from plait.core.space import Space
from plait.search.identity import identify
from plait.search.study import StudyTrials


def space_of(*arguments: str) -> Space:
    """The space of overrides such as "adapter.rank=4,8", and of nothing else."""
    return read_request(arguments, {}, {}).space


def study_of(
    space: Space,
    search: SearchSettings,
    storage: BaseStorage | None = None,
    *,
    run: RunSettings | None = None,
    folder: Callable[[str], Path] | None = None,
) -> StudyTrials:
    """The study of a search, in memory unless a storage is given."""
    identity = identify(space, JobSpec("base"), run or RunSettings(search=search))
    return StudyTrials(search, space, identity, storage or InMemoryStorage(), folder=folder)

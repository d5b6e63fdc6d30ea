"""What can be known to be wrong before the base model loads, each at the earliest moment."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data import check_data
from plait.jobs import JobSpec
from plait.paths import cache_dir
from plait.settings import ModelSettings


def check_jobs(jobs: Sequence[JobSpec]) -> None:
    """Every data set that a job may ask for exists and can be read.

    Raises:
        ConfigError, DataError: one does not, or cannot.
    """
    for spec in dict.fromkeys(job.data for job in jobs):
        check_data(spec)


def check_model(settings: ModelSettings, jobs: Sequence[JobSpec]) -> int:
    """Every adapter that a job may ask for fits the model's layers, by its configuration alone.

    Returns:
        the longest sample that the model takes, in tokens.

    Raises:
        ModelError: the model is not there, a target matches nothing, or a rank is above a layer's size.
        StorageError: the cache cannot be written.
    """
    from plait.models import check_rank, inspect_model

    shape = inspect_model(settings, cache=cache_dir())
    for adapter in dict.fromkeys(job.adapter for job in jobs):
        check_rank(adapter, shape.linears)
    return shape.max_length

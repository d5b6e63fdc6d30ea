"""What can be known to be wrong before the base model loads, each at the earliest moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plait.core.jobs import JobSpec
from plait.core.settings import ModelSettings, RunSettings
from plait.cost.profile_store import Profile
from plait.data.loading import check_data
from plait.engine.admission import Admission
from plait.engine.build import worker_facts
from plait.engine.catalogue import DataCatalogue
from plait.utils.paths import cache_dir

if TYPE_CHECKING:
    from plait.models.load import ModelShape


def check_jobs(jobs: Sequence[JobSpec]) -> None:
    """Every data set that a job may ask for exists and can be read.

    Raises:
        ConfigError, DataError: one does not, or cannot.
    """
    for spec in dict.fromkeys(job.data for job in jobs):
        check_data(spec)


def check_model(settings: ModelSettings, jobs: Sequence[JobSpec]) -> ModelShape:
    """Every adapter that a job may ask for sits on layers of the model, by its configuration alone.

    Returns:
        the model's shape.

    Raises:
        ConfigError: there is no such adapter variant.
        ModelError: the model is not there, or a target matches nothing, or something outside of its layers.
        StorageError: the cache cannot be written.
    """
    from plait.adapters.variants import VARIANTS
    from plait.models.load import inspect_model
    from plait.models.targets import resolve_targets

    for variant in {job.adapter.variant for job in jobs}:
        VARIANTS.get(variant)
    shape = inspect_model(settings, cache=cache_dir())
    for adapter in dict.fromkeys(job.adapter for job in jobs):
        resolve_targets(adapter.target_modules, shape.linears, shape.outside)
    return shape


def check_memory(
    settings: RunSettings,
    shape: ModelShape,
    data: DataCatalogue,
    jobs: Sequence[JobSpec],
    memory_bytes: int,
    profile: Profile | None = None,
) -> None:
    """Every job that may be asked for fits into memory by itself, by the coordinator's own prediction.

    Raises:
        CapacityError: one does not.
    """
    admission = Admission(worker_facts(settings.model, shape, memory_bytes), settings, profile)
    for job in jobs:
        admission.demand(job.adapter, data.longest(job.data))

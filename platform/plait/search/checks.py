"""Finds errors before the base model loads, each as early as possible: if it can be found without torch and
MLflow, before they are imported, which takes seconds.

A search that fails these checks leaves nothing behind.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import BaseStorage

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.core.space import as_written
from plait.cost.profile_store import Profile
from plait.data.loading import count_rows, generation_limit
from plait.engine.admission import Admission
from plait.engine.build import (
    LoadedData,
    check_engine,
    free_memory,
    open_data,
    recorded_before,
    settle_dtype,
    settle_engine,
    stored_profile,
    worker_facts,
)
from plait.engine.catalogue import DataCatalogue
from plait.engine.deployments import Choice, settle_deployment
from plait.engine.splits import settle_split
from plait.search.attributes import TRACKED
from plait.search.identity import ROWS, Identity, check_problem
from plait.search.objective import check_kept, check_measured
from plait.search.prior import check_prior
from plait.search.recorded import recorded_command
from plait.search.stopper import budgets_of
from plait.search.stopping import check_stopping, rungs_within
from plait.search.storage import Patience, existing_storage, quiet
from plait.search.study import check_restart
from plait.search.suggest import check_options
from plait.search.trials import SearchCommand
from plait.tracking.location import check_folder, locate
from plait.utils.paths import cache_dir, search_folder

if TYPE_CHECKING:
    from plait.models.load import ModelShape
    from plait.tracking.connection import AwayError


def check_command(command: SearchCommand) -> None:
    """Check the settings without writing anything or reading a data set, which the caller does."""
    settings = command.settings
    check_here(settings.cluster)
    check_search(command)
    check_folder(locate(settings.tracking).root, "tracking.root", make=False)
    check_engine(settings, command.probes)


def check_search(command: SearchCommand) -> None:
    """Check what does not depend on where the search trains: the same for a search and for its plan.

    Raises:
        ConfigError, SearchError: sampler, stopping rule, metrics or jobs do not fit each other.
    """
    search, jobs = command.settings.search, command.probes
    check_stopping(search)
    check_options(search, command.space)
    check_measured(search, dict.fromkeys(job.data for job in jobs))
    check_kept(search, jobs)
    if budgets := [job.train.steps for job in jobs if job.train.steps is not None]:
        rungs_within(search.stopping, budgets)


def check_added(command: SearchCommand, job: JobSpec) -> None:
    """Check a job that is added to a search as its others were at the start; not what depends on the host,
    which may be another one.

    Raises:
        InputError: it cannot be trained.
    """
    check_kept(command.settings.search, (job,))
    if job.train.steps is not None:
        rungs_within(command.settings.search.stopping, (job.train.steps,))
    known = {(each.adapter.variant, each.adapter.target_modules) for each in command.probes}
    if (
        job.adapter.variant,
        job.adapter.target_modules,
    ) not in known:  # else checked at the start, with torch
        check_model(command.settings.model, (job,))


def find_study(command: SearchCommand, name: str, identity: Identity) -> tuple[BaseStorage | None, bool]:
    """The storage, if it is there already; and whether the search has a study in it, or one of its processes
    got as far as training.

    Raises:
        StorageError: the storage does not answer, or cannot be made.
        SearchError: the study belongs to another search, it cannot learn from ``search.prior``, or one that
            should be restarted is being trained.
    """
    quiet()
    search, root = command.settings.search, command.settings.tracking.root
    storage = existing_storage(search.storage, root)
    patience = Patience()
    began = storage is not None and name in patience(lambda: optuna.get_all_study_names(storage))
    if storage is not None and began:
        study = patience(lambda: optuna.load_study(study_name=name, storage=storage))
        patience(lambda: check_restart(study) if search.fresh else check_problem(study, identity))
    patience(lambda: check_prior(name, search, command.space, storage))
    return storage, began or recorded_command(root, name) is not None


def ask_store(settings: RunSettings) -> AwayError | None:
    """Check that the tracking store can be used; return the error if it does not answer now.

    Raises:
        StorageError: it refuses; see ``check_tracking``.
    """
    from plait.tracking.connection import AwayError, check_tracking

    try:
        check_tracking(settings.tracking)
    except AwayError as error:
        return error
    return None


def tracked_run(storage: BaseStorage | None, name: str, settings: RunSettings, away: AwayError | None) -> str:
    """MLflow's id of a search's run, if it was recorded in the settings' store before; else "". Creates no
    study.

    Args:
        away: the error, if the store does not answer now.

    Raises:
        AwayError: it was not, and the store is unavailable, so its address cannot be checked.
    """
    run_id, store = "", ""
    if storage is not None and not settings.search.fresh:
        run_id, store = Patience()(lambda: _tracked(storage, name))
    here = str(locate(settings.tracking))
    if store == here:
        return run_id
    if away is None:
        return ""
    if store:
        remedy = f"Use tracking.uri={store}, where the search has been recorded so far, or start {here}."
        raise type(away)(away.value, away.rule, remedy)
    raise away


def _tracked(storage: BaseStorage, name: str) -> tuple[str, str]:
    try:
        attributes = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
    except KeyError:
        return "", ""
    run_id, store = attributes.get(TRACKED, ("", ""))
    return str(run_id), str(store)


DTYPE = "model.dtype"  # key in the material that a search begins with


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was checked and loaded before the model.

    Attributes:
        material: digests of model and data, by how they were requested, and the data's rows in words.
        said: lines to show about them.
    """

    material: Mapping[str, str]
    data: LoadedData
    settings: RunSettings
    said: Sequence[str]


def prepare(command: SearchCommand, name: str) -> Prepared:
    """Load the data, and check the jobs against model, memory and budget.

    Raises:
        InputError: they cannot be trained.
    """
    probes, folder = command.probes, search_folder(command.settings.tracking.root, name)
    settings = settle_dtype(command.settings)
    shape = check_model(settings.model, probes)
    check_cut(settings, shape, probes)
    data = open_data(settings, shape.max_length, probes)
    catalogue = data.catalogue
    settled = settle_here(settings, shape, catalogue, probes, points=command.space.size, folder=folder)
    settings = settled.settings
    check_memory(settings, shape, catalogue, probes, settled.memory_bytes, settled.profile)
    check_budgets(settings, catalogue, probes)
    specs = dict.fromkeys(job.data for job in probes)
    material = {f"data {spec.source} {spec.options}": catalogue.of(spec).digest for spec in specs}
    material |= {
        f"{ROWS}data {spec.source} {spec.options}": count_rows(spec, catalogue.of(spec)) for spec in specs
    }
    own = {DTYPE: settings.model.dtype, "model": shape.digest}
    chosen = () if settled.choice is None else (str(settled.choice),)
    return Prepared(own | material, data, settings, (*data.said, *chosen, *settled.said))


@dataclass(frozen=True, slots=True)
class Settled:
    """What a run takes of this machine.

    Attributes:
        settings: with what they left open.
        choice: of the replicas; None if there was none.
        memory_bytes: of each process.
        said: lines to show about the rest.
    """

    settings: RunSettings
    choice: Choice | None
    profile: Profile | None
    memory_bytes: int
    said: tuple[str, ...]


def settle_here(
    settings: RunSettings,
    shape: ModelShape,
    data: DataCatalogue,
    jobs: Sequence[JobSpec],
    *,
    points: int | None,
    folder: Path,
) -> Settled:
    """Choose the replicas, the capacity and the layers of each stage, if the settings leave them open; the
    same for a search and for its plan.

    Args:
        points: of the search space; None: any number.
        folder: of the search, which resumes with its own choices.

    Raises:
        CapacityError: no replicas fit, or no layers of their stages.
    """
    check = partial(check_cut, shape=shape, jobs=jobs)
    settings, choice = settle_deployment(settings, shape, data, jobs, check, points=points, folder=folder)
    settings, said = settle_engine(settings, shape, data, jobs, folder)
    profile, memory_bytes = stored_profile(settings, shape.digest), free_memory(settings)
    asked = {(job.adapter, data.longest(job.data), job.train.global_batch) for job in jobs}
    before = recorded_before(settings, folder)
    settings, layers = settle_split(settings, shape, profile, asked, memory_bytes, before)
    return Settled(settings, choice, profile, memory_bytes, (*said, *layers))


def check_budgets(settings: RunSettings, data: DataCatalogue, jobs: Sequence[JobSpec]) -> None:
    """Check that jobs have data for their steps, and rungs among them; the same for a search and its plan.

    Raises:
        DataError: a step takes far more samples than there are.
        ConfigError: a rung is not within the shortest budget.
    """
    rungs_within(settings.search.stopping, budgets_of(jobs, data))


def check_cut(settings: RunSettings, shape: ModelShape, jobs: Sequence[JobSpec]) -> None:
    """Refuse replicas that the model cannot be cut into, or that cannot do what the jobs ask.

    Raises:
        ConfigError, ModelError: as for :func:`check_stages` and :func:`check_slices`.
    """
    check_stages(settings, shape.layer_count, jobs)
    check_slices(settings, shape, jobs)


def check_stages(settings: RunSettings, layers: int, jobs: Sequence[JobSpec]) -> None:
    """Refuse a pipeline that the model cannot be cut into, or that cannot do what the jobs ask.

    Raises:
        ConfigError: there are too few or too many layers in its stages, answers are to be generated, or an
            order is set without stages.
    """
    cluster, order = settings.cluster, settings.engine.schedule
    if not cluster.staged and not cluster.to_choose and order != EngineSettings().schedule:
        raise ConfigError(
            f"engine.schedule={order} with replicas of one process",
            "It is the order in which the stages of a pipeline take microbatches; here there is one stage.",
            "Set cluster.processes and cluster.pipeline to the number of stages, or leave it out.",
        )
    if max(shape.pipeline for shape in cluster.shapes) > layers:
        raise ConfigError(
            f"{cluster.cutting} with a model of {layers} layers",
            "Each stage has at least one of them.",
            "Use fewer stages.",
        )
    if cluster.layer_split and sum(cluster.layer_split) != layers:
        raise ConfigError(
            f"cluster.layer_split={as_written(cluster.layer_split)} with {cluster.cutting}",
            f"The stages have all {layers} layers of the model.",
            "Leave it out: then they are balanced.",
        )
    keys = [f"cluster.{key}=true" for key in ("shard_base", "redeploy") if getattr(cluster, key)]
    if (cluster.staged or keys) and any(generation_limit(job.data) is not None for job in jobs):
        raise ConfigError(
            f"data.generate=true with {' and '.join(keys) or cluster.cutting}",
            "Answers are generated by processes with a whole model, not by those that hold one together.",
            "Leave one of them out.",
        )


def check_slices(settings: RunSettings, shape: ModelShape, jobs: Sequence[JobSpec]) -> None:
    """Refuse to cut layers that cannot be, or those of adapters other than plain LoRA.

    Raises:
        ModelError: the family has no plan for it, or its sizes do not divide.
        ConfigError: an adapter's variant needs whole layers.
    """
    from plait.adapters.variants import VARIANTS  # imports torch
    from plait.models.load import model_config
    from plait.models.slices import layer_slices

    slicing = settings.cluster.slicing
    if not slicing and not settings.cluster.shard_base:
        return
    for count in sorted({each.tensor for each in settings.cluster.shapes} - {1}):
        layer_slices(shape.linears, model_config(settings.model, cache=cache_dir()), 0, count, slicing)
    for variant in sorted({job.adapter.variant for job in jobs}):
        if not VARIANTS.get(variant).fused:
            raise ConfigError(
                f"adapter.variant={variant} with {slicing or 'cluster.shard_base=true'}",
                "Each process has a part of every layer; variants other than plain LoRA need whole layers.",
                "Leave one of them out.",
            )


def check_here(cluster: ClusterSettings) -> None:
    """Refuse to train on a cluster that is only described.

    Raises:
        ConfigError: it is not this machine.
    """
    if cluster.kind != "local":
        raise ConfigError(
            f"cluster: {cluster.options.get('name', cluster.kind)}",
            "Plait trains on this machine only (cluster=local).",
            "Leave out cluster, or run `plait plan` with the same arguments to see what would run on "
            "that cluster.",
        )


MODEL_CODE = "plait.models.load"  # imports torch and transformers


def load_model_code(say: Callable[[str], None]) -> None:
    """Import torch and transformers, which takes seconds, and say so; what is there is not mentioned."""
    if MODEL_CODE not in sys.modules:
        say("Loading torch and transformers ...")
        importlib.import_module(MODEL_CODE)


def check_model(settings: ModelSettings, jobs: Sequence[JobSpec]) -> ModelShape:
    """Check that every job's adapter targets layers of the model, using only the model's configuration.

    Returns:
        The model's shape.

    Raises:
        ConfigError: an adapter variant is unknown.
        ModelError: the model is missing, or a target matches nothing or something outside its layers.
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
    profile: Profile | None,
) -> None:
    """Check that every job fits into memory alone, by the coordinator's own prediction.

    Raises:
        CapacityError: one does not.
    """
    admission = Admission(worker_facts(settings, shape, memory_bytes), settings, profile)
    for job in jobs:
        admission.demand(job.adapter, data.longest(job.data), job.train.global_batch)

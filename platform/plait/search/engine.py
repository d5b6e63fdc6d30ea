"""Builds the engine of this process: data, frozen model, worker and coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.errors import ConfigError, StorageError
from plait.core.jobs import DataSpec, JobSpec
from plait.core.plans import Plan
from plait.core.samples import TokenisedData
from plait.core.settings import RunSettings
from plait.cost.profile_store import Profile, ProfileKey, load_profile
from plait.data import generation_limit, load_data, score, summary
from plait.engine.capacity import choose_capacity
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.search.checks import worker_facts
from plait.utils.files import write_text
from plait.utils.paths import cache_dir

if TYPE_CHECKING:
    import torch

    from plait.models import ModelShape

PLAN_FILE = "plan.json"
SLOW_ON_CPU = "float16"  # of the types of a model


@dataclass(slots=True)
class LoadedData:
    """Data sets tokenised for one model; by digest what they are, and how long their samples are."""

    catalogue: DataCatalogue
    facts: dict[str, Any]
    lengths: dict[str, Any]


def open_data(
    settings: RunSettings, max_length: int, jobs: Sequence[JobSpec], *, cluster: str = ""
) -> LoadedData:
    """Tokenise the data of all jobs with the model's tokeniser; no weight is loaded.

    Args:
        settings: of the run.
        max_length: longest sample that the model takes.
        jobs: that may be asked for.
        cluster: described cluster whose devices set engine.capacity; "": the user did.

    Raises:
        ConfigError, DataError, StorageError: as ``plait.data.load_data``.
    """
    from plait.models import load_tokeniser

    tokeniser = load_tokeniser(settings.model, cache=cache_dir())
    capacity = settings.engine.capacity

    def load(spec: DataSpec) -> TokenisedData:
        return load_data(
            spec, tokeniser, max_length=max_length, capacity=capacity, cluster=cluster, cache=cache_dir()
        )

    catalogue = DataCatalogue(load, generation_limit=generation_limit, judge=score)
    facts: dict[str, Any] = {}
    lengths: dict[str, Any] = {}
    for spec in dict.fromkeys(job.data for job in jobs):
        data = catalogue.of(spec)
        facts[data.digest] = {"source": spec.source, "options": spec.mapping()}
        lengths[data.digest] = {
            "train": asdict(summary(data.train)),
            "validation": asdict(summary(data.validation)),
        }
    return LoadedData(catalogue, facts, lengths)


def free_memory(settings: RunSettings) -> int:
    """Bytes that the run's device has, as its worker will count them."""
    from plait.engine.devices import choose_device
    from plait.engine.peaks import device_bytes

    return device_bytes(choose_device(settings.engine.device))


def check_engine(settings: RunSettings, jobs: Sequence[JobSpec]) -> None:
    """The run's device is there, its kernels run on it and compute the jobs' adapter variants.

    Raises:
        ConfigError: not.
    """
    if settings.engine.device in ("auto", "cpu") and settings.engine.kernels == "auto":
        return  # there is always one
    import torch

    from plait.engine.devices import check_kernels, check_variants, choose_device

    device = choose_device(settings.engine.device)
    check_kernels(settings.engine.kernels, device, getattr(torch, settings.model.dtype))
    check_variants(settings.engine.kernels, {job.adapter.variant for job in jobs})


def settle_engine(
    settings: RunSettings, shape: ModelShape, data: DataCatalogue, jobs: Sequence[JobSpec], folder: Path
) -> tuple[RunSettings, tuple[str, ...]]:
    """The settings with the capacity that the run takes, and what is to be said of it.

    A search that goes on takes the capacity and the kernels that it was begun with where they are left open.

    Args:
        settings: of the run.
        shape: of its model.
        data: of all jobs.
        jobs: that may be asked for.
        folder: of the search, where its plan is.
    """
    facts = worker_facts(settings.model, shape, free_memory(settings))
    plan = None if settings.search.fresh else read_plan(folder)
    before = {} if plan is None else plan.choices
    recorded = before.get("capacity")
    capacity = choose_capacity(
        settings,
        facts,
        stored_profile(settings, shape.digest),
        {(job.adapter, data.longest(job.data)) for job in jobs},
        recorded if isinstance(recorded, int) else None,
    )
    asked: dict[str, int | str] = {"capacity": capacity}
    if settings.engine.kernels != "auto":
        asked["kernels"] = settings.engine.kernels
    said = tuple(
        f"engine.{name}={value}; this search was begun with {before[name]}, so that sums may round otherwise."
        for name, value in asked.items()
        if name in before and before[name] != value
    )
    return replace(settings, engine=replace(settings.engine, capacity=capacity)), (
        *said,
        *_slow_here(settings),
    )


def _slow_here(settings: RunSettings) -> tuple[str, ...]:
    """What is to be said of a type that the device has no arithmetic for."""
    from plait.engine.devices import choose_device

    if settings.model.dtype != SLOW_ON_CPU or choose_device(settings.engine.device).type != "cpu":
        return ()
    return (
        f"model.dtype={SLOW_ON_CPU} is many times slower on a CPU than model.dtype=float32 or "
        "model.dtype=bfloat16: take one of these.",
    )


def stored_profile(settings: RunSettings, digest: str) -> Profile | None:
    """The stored profile of a model (its digest) on the run's device; None where there is none.

    Raises:
        ConfigError: as ``load_profile``.
    """
    from plait.engine.devices import choose_device, device_kind

    device = choose_device(settings.engine.device).type
    key = ProfileKey.of(
        digest, settings.model.dtype, device_kind(device), settings.engine, on_cpu=device == "cpu"
    )
    return load_profile(key, cache=cache_dir())


def build_coordinator(
    settings: RunSettings, data: DataCatalogue, folder: Path, states: Path | None = None
) -> Coordinator:
    """Load the model and put the engine together.

    Args:
        settings: of the run.
        data: shared by coordinator and worker.
        folder: for finished adapters, and saved states where ``states`` is None.
        states: for saved states.

    Raises:
        ModelError, CapacityError: the model cannot be loaded, or does not fit.
    """
    from plait.engine.devices import choose_device
    from plait.engine.worker import LocalWorker
    from plait.models import load_model

    device = choose_device(settings.engine.device)
    model = load_model(settings.model, cache=cache_dir(), device=device)
    kernels = settings.engine.kernels
    if not settings.search.fresh:
        kernels = same_kernels(kernels, device, model.dtype, folder)
    engine = replace(settings.engine, kernels=kernels)
    parallel = settings.search.parallel  # beyond these, a job of higher priority displaces another
    planner = replace(settings.planner, max_jobs=min(parallel, settings.planner.max_jobs or parallel))
    return Coordinator(
        LocalWorker(model, data, engine),
        data,
        replace(settings, planner=planner),
        folder=folder,
        states=states,
        profile=stored_profile(settings, model.config_digest),
        patient=True,
    )


def same_kernels(kernels: str, device: torch.device, dtype: torch.dtype, folder: Path) -> str:
    """The kernels that a search was begun with, where they are left to be chosen by measurement: it goes on
    with them, whatever would be measured now. Those that the settings name otherwise."""
    from plait.engine.devices import check_kernels

    plan = read_plan(folder)
    if kernels != "auto" or plan is None or plan.choices.get("device") != str(device):
        return kernels
    try:
        check_kernels(recorded := str(plan.choices.get("kernels")), device, dtype)
    except ConfigError:  # they do not run here any more
        return kernels
    return recorded


def write_plan(folder: Path, plan: Plan) -> str:
    """Keep a plan in the search's folder; its JSON.

    Raises:
        StorageError: the folder cannot be written.
    """
    text = plan.to_json()
    try:
        write_text(folder / PLAN_FILE, text)
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror}",
            "The search's folder keeps its plan.",
            "Make room, or make the folder writable.",
        ) from error
    return text


def read_plan(folder: Path) -> Plan | None:
    """The plan that a search was trained by before; None where there is none that this release reads."""
    try:
        return Plan.from_json((folder / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None

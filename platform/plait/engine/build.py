"""Builds the engine of this process (data, frozen model, worker and coordinator) and records its choices.

A resumed search uses the capacity and the kernels with which it was started, from its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.errors import ConfigError
from plait.core.jobs import DataSpec, JobSpec
from plait.core.plans import Choices, Plan, recorded_choices
from plait.core.samples import TokenisedData
from plait.core.settings import (
    AUTO,
    USUAL_CAPACITY,
    WHOLE,
    ClusterSettings,
    EngineSettings,
    RunSettings,
)
from plait.cost.memory import linear_bytes
from plait.cost.profile_store import Profile, ProfileKey, load_profile
from plait.data.loading import describe_rows, each_evaluation, generation_limit, load_data
from plait.data.scoring import score
from plait.engine.admission import choose_capacity
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.redeployment import Prefer
from plait.engine.replicas import cut, sharded
from plait.engine.worker import ActivationShape, Worker, WorkerFacts
from plait.models.targets import LinearInfo
from plait.utils.counts import counted
from plait.utils.files import disk_errors, write_text
from plait.utils.paths import cache_dir

if TYPE_CHECKING:
    import torch

    from plait.models.load import ModelShape

PLAN_FILE = "plan.json"
MakeWorker = Callable[[RunSettings, DataCatalogue, str], Worker]  # the last: tiles of the kernels
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True)
class LoadedData:
    """Data sets tokenised for one model, with their digests and the lengths of their samples.

    Attributes:
        said: lines about rows that are truncated or left out.
    """

    catalogue: DataCatalogue
    facts: dict[str, Any]
    lengths: dict[str, Any]
    said: tuple[str, ...] = ()


def open_data(
    settings: RunSettings, max_length: int, jobs: Sequence[JobSpec], *, cluster: str = ""
) -> LoadedData:
    """Tokenise the data of all jobs with the model's tokeniser, without loading weights.

    Args:
        cluster: described cluster whose devices set engine.capacity; "": the user did.

    Raises:
        ConfigError, DataError, StorageError: as for ``plait.data.load_data``.
    """
    from plait.models.load import load_tokeniser

    tokeniser = load_tokeniser(settings.model, cache=cache_dir())
    capacity = settings.engine.capacity

    def load(spec: DataSpec) -> TokenisedData:
        return load_data(
            spec,
            tokeniser,
            max_length=max_length,
            capacity=capacity,
            cluster=cluster,
            key=settings.capacity_key,
            cache=cache_dir(),
        )

    catalogue = DataCatalogue(
        load, generation_limit=generation_limit, each_evaluation=each_evaluation, score=score
    )
    facts: dict[str, Any] = {}
    lengths: dict[str, Any] = {}
    said: dict[str, None] = {}
    for spec in dict.fromkeys(job.data for job in jobs):
        data = catalogue.of(spec)
        said[describe_rows(spec, data, max_length)] = None
        facts[data.digest] = {"source": spec.source, "options": spec.mapping()}
        lengths[data.digest] = {"train": data.train.summary(), "validation": data.validation.summary()}
    return LoadedData(catalogue, facts, lengths, tuple(filter(None, said)))


def device_of(settings: RunSettings) -> torch.device:
    """The run's device.

    Raises:
        ConfigError: as for ``choose_device``.
    """
    from plait.engine.devices import choose_device  # imports torch, which takes long

    return choose_device(settings.engine.device)


def on_gpu(settings: RunSettings) -> bool:
    """Whether the run's device is a GPU."""
    return device_of(settings).type != "cpu"


def free_memory(settings: RunSettings) -> int:
    """Bytes of each of the run's devices, as its worker will count them."""
    from plait.engine.devices import device_bytes

    device = device_of(settings)
    beside = settings.cluster.per_host or settings.cluster.processes
    return device_bytes(device) // (beside if device.type == "cpu" else 1)


def replica_bytes(settings: RunSettings) -> tuple[int, ...]:
    """Bytes of each process's device, as the workers will count them: GPUs may differ."""
    import torch

    from plait.engine.devices import device_bytes

    processes = settings.cluster.processes
    if not on_gpu(settings):
        return (free_memory(settings),) * processes
    gpus = torch.cuda.device_count()
    return tuple(device_bytes(torch.device("cuda", number % gpus)) for number in range(processes))


def check_engine(settings: RunSettings, jobs: Sequence[JobSpec]) -> None:
    """Check that the run's device exists, and that its kernels run on it and compute the jobs' adapter
    variants.

    Raises:
        ConfigError: one of these is not so.
    """
    engine, processes = settings.engine, settings.cluster.processes
    settings.cluster.check_lists()
    _check_graphs(settings)
    if engine.device in ("auto", "cpu") and engine.kernels == "auto" and processes == 1:
        return  # there is always one
    import torch

    from plait.engine.devices import check_kernels, check_variants, cores

    device = device_of(settings)
    dtype = settle_dtype(settings).model.dtype
    check_kernels(engine.kernels, device, getattr(torch, dtype))
    check_variants(engine.kernels, {job.adapter.variant for job in jobs})
    there = torch.cuda.device_count() if device.type == "cuda" else cores()
    if settings.cluster.per_host is None and processes > there:  # launchers may show each its own alone
        kind = "GPU" if device.type == "cuda" else "processor core"
        raise ConfigError(
            f"cluster.processes={processes}",
            f"Each process needs its own {kind}, and there are {there}.",
            f"Use at most {there}.",
        )


def _check_graphs(settings: RunSettings) -> None:
    """Refuse CUDA graphs where none would be made."""
    engine, cluster = settings.engine, settings.cluster
    if not engine.graph_tokens:
        return
    against = {
        "engine.device=cpu": engine.device == "cpu",
        f"engine.kernels={engine.kernels}": engine.kernels not in ("auto", "triton"),
        "engine.checkpointing=true": engine.checkpointing,
        "cluster.shard_base=true": cluster.shard_base,
        cluster.cutting: all(shape.processes > 1 for shape in cluster.shapes),
    }
    found = [name for name, there in against.items() if there]
    if not found and not on_gpu(settings):
        found = ["a machine without a GPU"]
    if found:
        raise ConfigError(
            f"engine.graph_tokens={engine.graph_tokens} with {', '.join(found)}",
            "Microbatches are recorded on one GPU that holds the whole model, with Triton's kernels.",
            "Leave engine.graph_tokens out.",
        )


def settle_dtype(settings: RunSettings) -> RunSettings:
    """The settings with ``model.dtype=auto`` replaced by the device's; one that resumes has its study's.

    Raises:
        ConfigError: as for ``choose_device``.
    """
    from plait.engine.devices import choose_dtype

    if settings.model.dtype != AUTO:
        return settings
    return replace(settings, model=replace(settings.model, dtype=choose_dtype(device_of(settings))))


def settle_engine(
    settings: RunSettings,
    shape: ModelShape,
    data: DataCatalogue,
    jobs: Sequence[JobSpec],
    folder: Path | None,
) -> tuple[RunSettings, tuple[str, ...]]:
    """The settings with the run's capacity, and what the user should know about it; ``folder`` as for
    :func:`recorded_before`."""
    facts = worker_facts(settings, shape, free_memory(settings))
    before = recorded_before(settings, folder)
    recorded = before.get("capacity")
    profile = stored_profile(settings, shape.digest)
    capacity = choose_capacity(
        settings,
        facts,
        profile,
        {(job.adapter, data.longest(job.data), job.train.global_batch) for job in jobs},
        recorded if isinstance(recorded, int) else None,
        on_gpu=on_gpu(settings),
    )
    asked: dict[str, int | str] = {
        "engine.capacity": capacity,
        "engine.kernels": settings.engine.kernels,
        "engine.threads": str(settings.engine.threads or AUTO),
        "engine.graph_tokens": str(settings.engine.graph_tokens),
        "cluster.processes": settings.cluster.processes,
    }
    said = tuple(
        f"{name}={value}; this search was started with {before[key]}, so rounding may differ."
        for name, value in asked.items()
        if (key := name.partition(".")[2]) in before and value not in (before[key], AUTO)
    )
    profiled = settings.engine.capacity is None and recorded is None and profile is not None
    if profiled and capacity != USUAL_CAPACITY:
        said += (
            f"Microbatches have up to {capacity:,} tokens, by the profile of `plait profile` (without it "
            f"{USUAL_CAPACITY:,}); engine.capacity sets another number.",
        )
    return replace(settings, engine=replace(settings.engine, capacity=capacity)), (
        *said,
        *_slow_here(settings),
        *_too_many_threads(settings),
    )


def _too_many_threads(settings: RunSettings) -> tuple[str, ...]:
    """A warning if the processes of this host ask for more threads than there are processor cores."""
    from plait.engine.devices import cores, host_cores

    threads, launched = settings.engine.threads or 0, settings.cluster.per_host
    here = launched or settings.cluster.processes
    shared = host_cores() if launched else cores()  # a launcher may bind each process to cores of its own
    there, of = (cores(), "") if threads > cores() else (shared, f" in each of {here} processes")
    if (threads <= cores() and threads * here <= shared) or on_gpu(settings):
        return ()
    return (
        f"engine.threads={threads}{of}, with {counted(there, 'processor core')}: threads that wait for a "
        "core make small steps many times slower.",
    )


def _slow_here(settings: RunSettings) -> tuple[str, ...]:
    """A warning if the device has no arithmetic for the dtype."""
    from plait.engine.devices import choose_dtype

    device, dtype = device_of(settings), settings.model.dtype
    if dtype in (AUTO, "float32") or (device.type == "cuda" and dtype == "float16"):
        return ()
    if dtype == (fast := choose_dtype(device)):
        return ()
    return (f"model.dtype={dtype} is much slower on this device than {fast}. Use model.dtype={fast}.",)


def worker_facts(settings: RunSettings, shape: ModelShape, memory_bytes: int) -> WorkerFacts:
    """The facts that a worker with this model will report, known before its weights are loaded.

    Args:
        memory_bytes: of each process.
    """
    model, cluster = settings.model, settings.cluster
    element_bytes = ELEMENT_BYTES[model.dtype]
    activations = ActivationShape.of(
        shape,
        weight_bytes=_weight_bytes(shape, element_bytes, model.quantise),
        element_bytes=element_bytes,
        made_bytes=largest_made(shape.together, element_bytes, model.quantise),
    )
    facts = WorkerFacts(activations, shape.linears, shape.max_length, memory_bytes, outside=shape.outside)
    if cluster.shard_base:
        facts = sharded(facts, cluster.processes)
    if not cluster.staged or max(each.pipeline for each in cluster.shapes) > shape.layer_count:
        return facts  # what cannot be is refused elsewhere
    return replace(
        facts,
        held=cut(facts, settings, cluster.shapes, memory_bytes, _sliced(shape, cluster)),
        devices=facts.devices * len(cluster.stages),
    )


def _sliced(shape: ModelShape, cluster: ClusterSettings) -> dict[int, tuple[LinearInfo, ...]]:
    """The linears with their sizes in one of so many slices, which are all alike."""
    from plait.models.slices import layer_slices, local_linears

    return {
        count: local_linears(shape.linears, layer_slices(shape.linears, shape.config, 0, count))
        for count in {each.tensor for each in cluster.shapes} - {1}
    }


def _weight_bytes(shape: ModelShape, element_bytes: int, quantise: str) -> int:
    """Bytes of the frozen weights."""
    sizes = [(each.out_features, each.in_features) for each in shape.linears]
    dense = [element_bytes * rows * features for rows, features in sizes]
    kept = [linear_bytes(rows, features, element_bytes, quantise) for rows, features in sizes]
    return shape.parameters * element_bytes - sum(dense) + sum(kept)


def largest_made(together: Iterable[Sequence[LinearInfo]], element_bytes: int, quantise: str) -> int:
    """Most bytes while quantised weights are made for a product: all that read the same input together."""
    if quantise == WHOLE:
        return 0
    from plait_kernels.quantised import made_bytes

    groups = ([(each.out_features, each.in_features) for each in own] for own in together)
    return max(made_bytes(sizes, element_bytes, quantise) for sizes in groups)


def stored_profile(settings: RunSettings, digest: str) -> Profile | None:
    """The stored profile of a model (its digest) on the run's device; None if there is none.

    Processes that share a processor have fewer threads each: of a profile with all of them, only the memory
    holds, and its seconds are left out.

    Raises:
        ConfigError: as for ``load_profile``.
    """
    from plait.engine.devices import device_kind

    device = device_of(settings).type

    def load(engine: EngineSettings) -> Profile | None:
        kind = device_kind(device)
        key = ProfileKey.of(digest, settings.model.dtype, kind, engine, on_cpu=device == "cpu")
        return load_profile(key, cache=cache_dir())

    own = replace(settings.engine, threads=threads_each(settings))
    if (found := load(own)) is not None or own == settings.engine:
        return found
    whole = load(settings.engine)
    return whole and replace(whole, time=None, time_error=None)


def threads_each(settings: RunSettings) -> int | None:
    """``engine.threads`` of each process: of several on a processor an equal part; None: as many as usual."""
    from plait.engine.devices import usual_threads

    engine, cluster = settings.engine, settings.cluster
    if engine.threads or cluster.processes == 1 or on_gpu(settings):
        return engine.threads
    return max(1, usual_threads() // (cluster.per_host or cluster.processes))


def build_coordinator(
    settings: RunSettings,
    data: DataCatalogue,
    folder: Path,
    checkpoints: Path | None = None,
    commit: Callable[[], None] = lambda: None,
    make_worker: MakeWorker | None = None,
    grown: Callable[[], bool] = lambda: False,
    prefer: Prefer | None = None,
) -> Coordinator:
    """Load the model and put the engine together.

    Args:
        folder: folder for finished adapters, and for checkpoints if ``checkpoints`` is None.
        make_worker: makes the worker that owns the tensors; None: one in this process.
        grown: whether it would make one with more processes now.
        prefer: tells it how many processes each replica should have.

    Raises:
        ModelError, CapacityError: the model cannot be loaded, or does not fit.
    """
    before = recorded_before(settings, folder)
    engine = replace(settings.engine, kernels=_same_kernels(settings, before))
    begun = replace(settings, engine=engine, cluster=_same_speeds(settings.cluster, before))
    worker = (make_worker or _local_worker)(begun, data, str(before.get("tiles", "")))

    def renew() -> Worker:
        assert make_worker is not None
        chosen = replace(begun.engine, kernels=worker.facts.chosen["kernels"])
        speeds, cluster = worker.facts.speeds, begun.cluster
        if len(speeds) == cluster.processes:  # all have come the first time
            cluster = replace(cluster, speeds=speeds)
        tiles = worker.facts.chosen.get("tiles", "")
        return make_worker(replace(begun, engine=chosen, cluster=cluster), data, tiles)

    # By the kernels that were asked for, and the threads that each of several processes has got.
    threads = worker.facts.chosen.get("threads") if settings.cluster.processes > 1 else None
    own = replace(settings.engine, threads=int(threads) if threads else settings.engine.threads)
    # Beyond these, a job of higher priority preempts another.
    planner = replace(settings.planner, max_jobs=settings.most_jobs)
    return Coordinator(
        worker,
        data,
        replace(settings, planner=planner),
        folder=folder,
        checkpoints=checkpoints,
        commit=commit,
        profile=stored_profile(replace(settings, engine=own), worker.facts.model),
        renew=None if make_worker is None else renew,
        grown=grown,
        prefer=prefer,
    )


def _same_speeds(cluster: ClusterSettings, before: Choices) -> ClusterSettings:
    """The cluster with the speeds that the search was started with, if they are left to be measured."""
    recorded = tuple(map(float, str(before.get("speeds", "")).split()))
    if cluster.speeds or cluster.processes == 1 or len(recorded) != cluster.processes:
        return cluster
    return replace(cluster, speeds=recorded)


def _local_worker(settings: RunSettings, data: DataCatalogue, tiles: str) -> Worker:
    from plait.engine.local_worker import LocalWorker
    from plait.models.load import load_model

    model = load_model(settings.model, cache=cache_dir(), device=device_of(settings))
    return LocalWorker(model, data, settings.engine, tiles=tiles)


def _same_kernels(settings: RunSettings, before: Choices) -> str:
    """The kernels that the settings name. If they are to be chosen by measurement, those with which the
    search was started, whatever would be measured now."""
    import torch

    from plait.engine.devices import check_kernels

    kernels, device = settings.engine.kernels, device_of(settings)
    if kernels != "auto" or str(before.get("device")).partition(":")[0] != device.type:  # of one kind
        return kernels
    try:
        check_kernels(recorded := str(before.get("kernels")), device, getattr(torch, settings.model.dtype))
    except ConfigError:  # they no longer run here
        return kernels
    return recorded


def write_plan(folder: Path, plan: Plan) -> str:
    """Store a plan in the search's folder, and return its JSON.

    Raises:
        StorageError: the folder cannot be written.
    """
    text = plan.to_json()
    rule = "The plan of a search is stored in its folder."
    with disk_errors(folder, rule, "Free some space, or make the folder writable."):
        write_text(folder / PLAN_FILE, text)
    return text


def recorded_before(settings: RunSettings, folder: Path | None) -> Choices:
    """The choices with which the search in ``folder`` was trained before; none if it begins afresh, or there
    is no plan that this release reads."""
    if settings.search.fresh or folder is None:
        return {}
    try:
        return recorded_choices((folder / PLAN_FILE).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}

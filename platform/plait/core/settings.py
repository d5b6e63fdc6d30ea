"""Settings of a run (not of a job) as frozen dataclasses: what ``conf/`` becomes at the edge.

``model``, ``engine``, ``planner``, ``cluster``, ``tracking`` and ``search`` belong to the run; sweeping
one of them is refused. ``plait.config.build`` builds these from Hydra's DictConfig.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from plait.core.checks import NOT_BLANK, POSITIVE_SHARE, Rule, above, at_least, between, check, each, one_of
from plait.core.errors import ConfigError
from plait.core.objectives import MAXIMISE, MINIMISE, Constraint, Objective
from plait.core.plans import ReplicaShape
from plait.core.space import as_written

MODEL_KINDS = ("smollm2", "hf", "gguf", "tiny")
DTYPES = ("float32", "bfloat16", "float16")
WHOLE = "none"  # model.quantise: weights in the dtype
QUANTISED = ("int8", "nf4", "fp8")
AUTO = "auto"
MOST_THREADS = 1024  # CPU threads: torch crashes at absurd numbers
USUAL_CAPACITY = 2048  # tokens of a microbatch if nothing has been measured
GPU_CAPACITIES = (16_384, 8192, 4096)  # on a GPU: the first that leaves memory for other jobs
DIRECTIONS = (MINIMISE, MAXIMISE)
SHAPE = re.compile(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})")  # of a replica: slices x stages, or stages
SHAPES = Rule(
    "auto or a list of the stages of each replica, or slices x stages, such as [1,2,2x4]",
    lambda given: given == AUTO or (isinstance(given, tuple) and all(map(SHAPE.fullmatch, map(str, given)))),
)
EACH_DIRECTION = Rule(
    "maximize, minimize or a list of them",
    lambda given: {given} <= set(DIRECTIONS) if isinstance(given, str) else set(given) <= set(DIRECTIONS),
)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The frozen base model; conf/model says what each key means."""

    kind: Annotated[str, one_of(*MODEL_KINDS)] = "smollm2"
    id: str | None = None
    path: str | None = None
    family: str = "llama"
    dtype: Annotated[str, one_of(AUTO, *DTYPES)] = AUTO
    quantise: Annotated[str, one_of(WHOLE, *QUANTISED)] = WHOLE
    max_length: Annotated[int | None, at_least(2)] = None
    revision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check(self, "model")
        for name, kind in (("id", "hf"), ("path", "gguf")):
            value = getattr(self, name)
            if value is not None and self.kind != kind:  # another model would be trained without a word
                raise ConfigError(
                    f"model.{name}={value} with model.kind={self.kind}",
                    f"Only model={kind} has a model.{name}.",
                    f"Write `model={kind} model.{name}={value}`.",
                )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How microbatches are executed; conf/engine says what each key means.

    Backends of ``kernels`` are checked where they are known (``plait.engine.devices``).
    """

    kernels: str = "auto"
    capacity: Annotated[int | None, at_least(2)] = None
    threads: Annotated[int | None, between(1, MOST_THREADS)] = None
    checkpointing: bool = False
    graph_tokens: Annotated[int, at_least(0)] = 0
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    schedule: Annotated[str, one_of("plait", "lorafusion", "mlora", "1f1b", "gpipe", "sequential")] = "plait"
    checkpoint_steps: Annotated[int | None, at_least(1)] = None
    checkpoint_minutes: Annotated[float | None, at_least(0)] = 5.0
    checkpoint_keep: Annotated[int, at_least(1)] = 2

    def __post_init__(self) -> None:
        check(self, "engine")

    @property
    def capacity_or_usual(self) -> int:
        """The capacity, or ``USUAL_CAPACITY`` if none is set."""
        return USUAL_CAPACITY if self.capacity is None else self.capacity


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How jobs are admitted and packed, and how many devices of a described cluster are used; conf/planner
    says what each key means."""

    max_jobs: Annotated[int | None, at_least(1)] = None
    memory_share: Annotated[float, POSITIVE_SHARE] = 0.8
    objective: Annotated[str, one_of("device_seconds", "money", "time")] = "device_seconds"
    slack: Annotated[float, at_least(0)] = 0.1

    def __post_init__(self) -> None:
        check(self, "planner")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The machine: "local" is this one, "described" is simulated; conf/cluster says what each key means.

    Attributes:
        per_host: how many processes are on this host; None: all. Launchers say it.
        kinds: kinds of devices, if a described cluster has several: entries of ``plait.cost.clusters.Kind``.
    """

    kind: str = "local"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    processes: Annotated[int, between(1, 1024)] = 1
    per_host: Annotated[int | None, between(1, 1024)] = None
    capacities: Annotated[tuple[int, ...], each(at_least(2))] = ()
    speeds: Annotated[tuple[float, ...], each(above(0))] = ()
    address: str | None = None
    port: Annotated[int, between(1, 65534)] = 29610
    interface: str | None = None
    key_file: str | None = None
    pipeline: Annotated[int, between(1, 1024)] = 1
    deployment: Annotated[tuple[int | str, ...] | str | int, SHAPES] = ()
    tensor: Annotated[int, between(1, 1024)] = 1
    redeploy: bool = False
    layer_split: Annotated[tuple[int, ...], each(at_least(1))] = ()
    optimiser: Annotated[str, one_of("repeated", "sharded")] = "repeated"
    shard_base: bool = False
    link_gb_per_s: Annotated[float | None, above(0)] = None
    join_seconds: Annotated[float, above(0)] = 60.0
    silence_seconds: Annotated[float, at_least(5)] = 60.0
    restarts: Annotated[int, at_least(0)] = 5
    price_per_device_hour: Annotated[float | None, at_least(0)] = None
    kinds: tuple[dict[str, Any], ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.deployment, (int, str)) and SHAPE.fullmatch(str(self.deployment)):
            raise ConfigError(
                f"cluster.deployment={self.deployment}",
                f"It is the list of all replicas, in brackets, or {AUTO}.",
                f"Write cluster.deployment=[{self.deployment}].",
            )
        check(self, "cluster")
        if self.processes > 1:  # a launcher may still say that there are more than one
            self.check_lists()
        if self.kind == "local" and self.kinds:
            raise ConfigError(
                f"cluster.kinds with {len(self.kinds)} kinds of devices",
                "Kinds of devices can only be set for described clusters; this machine's are detected.",
                "Choose a described cluster with cluster=NAME, or leave cluster.kinds out.",
            )
        if self.kind != "local" and self.processes > 1:
            raise ConfigError(
                f"cluster.processes={self.processes} with a described cluster",
                "It is for this machine; on a described cluster the plan chooses the replicas.",
                "Leave cluster.processes out; `plait plan --devices N` plans for N devices.",
            )

    @property
    def shapes(self) -> tuple[ReplicaShape, ...]:
        """The shape of each replica, in their order; single processes until they are chosen."""
        found = (SHAPE.fullmatch(str(each)) for each in self._listed)
        given = tuple(ReplicaShape(int(each[2]), int(each[1] or 1)) for each in found if each)
        alike = ReplicaShape(self.pipeline, self.tensor)
        return given or (alike,) * max(1, self.processes // alike.processes)

    @property
    def stages(self) -> tuple[int, ...]:
        """How many processes hold each replica, in their order; single ones until they are chosen."""
        return tuple(shape.processes for shape in self.shapes)

    @property
    def to_choose(self) -> bool:
        """Whether the replicas are still to be chosen."""
        return self.deployment == AUTO

    @property
    def slicing(self) -> str:
        """The key by which layers are cut into slices, with its value; "" if they are not."""
        if max(shape.tensor for shape in self.shapes) == 1:
            return ""
        return self._given if self.deployment else f"cluster.tensor={self.tensor}"

    @property
    def cutting(self) -> str:
        """The keys by which several processes hold a replica, with their values; "" if none does."""
        if not self.staged:
            return ""
        keys = (f"cluster.{key}={own}" for key in ("pipeline", "tensor") if (own := getattr(self, key)) > 1)
        return self._given if self.deployment else " and ".join(keys)

    @property
    def _given(self) -> str:
        return f"cluster.deployment={as_written(self._listed)}"

    @property
    def _listed(self) -> tuple[int | str, ...]:
        return self.deployment if isinstance(self.deployment, tuple) else ()

    @property
    def staged(self) -> bool:
        """Whether several processes hold a replica, as stages or with slices of each layer."""
        return max(self.stages) > 1

    @property
    def replica_capacities(self) -> tuple[int, ...]:
        """Most tokens of a microbatch on each replica, if they are given: those of its processes together."""
        if not self.staged:
            return self.capacities
        if len(self.capacities) != sum(self.stages):  # none, or a launcher has not said how many there are
            return ()
        left = iter(self.capacities)
        return tuple(sum(islice(left, stages)) for stages in self.stages)

    def check_lists(self) -> None:
        """Check that each list has an entry for each process, and that the replicas have all processes;
        ConfigError otherwise."""
        for key in ("capacities", "speeds"):
            if len(given := getattr(self, key)) not in (0, self.processes):
                raise ConfigError(
                    f"cluster.{key}={list(given)} with cluster.processes={self.processes}",
                    "It must have one entry for each process.",
                    f"Set {self.processes} entries, or none.",
                )
        self._check_deployment()

    def _check_processes(self) -> None:
        """Check that each process belongs to a replica."""
        equal = [f"cluster.{key}={own}" for key in ("pipeline", "tensor") if (own := getattr(self, key)) > 1]
        if self.deployment and equal:
            raise ConfigError(
                f"{self._given} with {' and '.join(equal)}",
                "cluster.deployment says how many stages and slices each replica has.",
                "Leave one of them out; in cluster.deployment 2x3 is a replica of 3 stages in 2 slices.",
            )
        needed = sum(self.stages) if self.deployment else self.pipeline * self.tensor
        if sum(self.stages) == self.processes:
            return
        if self.deployment:
            raise ConfigError(
                f"{self._given} with cluster.processes={self.processes}",
                f"These replicas need exactly {needed} processes.",
                f"Use {needed} (cluster.processes={needed}), or change cluster.deployment.",
            )
        raise ConfigError(
            f"{' and '.join(equal)} with cluster.processes={self.processes}",
            f"Each replica takes {needed} processes, so their number must be a multiple of {needed}.",
            f"Use {needed} (cluster.processes={needed}), or list replicas that differ in cluster.deployment.",
        )

    def _check_shard_base(self) -> None:
        """Check that a sharded base is shared by several processes that each run all layers."""
        if not self.shard_base or (self.processes > 1 and not self.staged and not self.redeploy):
            return
        beside = "cluster.redeploy=true, which makes stages" if self.redeploy else self.cutting
        if beside:
            raise ConfigError(
                f"cluster.shard_base=true with {beside}",
                "Processes that share a sharded base each run all of its layers: there are no stages and no "
                "slices.",
                "Leave one of them out; stages and slices divide the base model among processes, too.",
            )
        raise ConfigError(
            f"cluster.shard_base=true with cluster.processes={self.processes}",
            "A base model is sharded among several processes.",
            "Use at least two (cluster.processes=2), or leave cluster.shard_base out.",
        )

    def _check_to_choose(self) -> None:
        """Check that nothing is given that is chosen."""
        usual = ClusterSettings()
        keys = ("pipeline", "tensor", "layer_split", "shard_base", "redeploy", "capacities")
        if given := next((key for key in keys if getattr(self, key) != getattr(usual, key)), None):
            raise ConfigError(
                f"cluster.{given}={as_written(getattr(self, given))} with cluster.deployment={AUTO}",
                "Plait then chooses the replicas, their stages and slices, and whether to shard the base.",
                f"Leave one of them out; `plait plan` with cluster.deployment={AUTO} shows all candidates.",
            )

    def _check_deployment(self) -> None:
        """Check that the replicas have all processes, and that what is set beside holds for stages."""
        if self.to_choose:
            self._check_to_choose()
        self._check_processes()
        self._check_shard_base()
        if (self.staged or self.redeploy) and self.optimiser != "repeated":
            beside = "stages" if self.staged else "cluster.redeploy=true, which makes stages"
            raise ConfigError(
                f"cluster.optimiser={self.optimiser} with {beside}",
                "Each stage has its own part of every adapter, with its moments.",
                "Leave cluster.optimiser out.",
            )
        if self.slicing and self.redeploy:
            raise ConfigError(
                f"cluster.redeploy=true with {self.slicing}",
                "Replicas change between one process and several stages; slices of layers cannot change.",
                "Leave one of them out.",
            )
        stages = [shape.pipeline for shape in self.shapes]
        if self.layer_split and set(stages) - {1} != {len(self.layer_split)}:
            raise ConfigError(
                f"cluster.layer_split={list(self.layer_split)} with replicas of {stages} stages",
                "It has the number of layers of each stage.",
                "Leave it out: then the stages are balanced.",
            )


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    """Where losses, throughput and adapters go; conf/tracking says what each key means."""

    uri: str | None = None
    experiment: str = "plait"
    flush_seconds: Annotated[float, at_least(0)] = 2.0
    points: Annotated[int, at_least(1)] = 320
    root: Path = Path("plait-runs")

    def __post_init__(self) -> None:
        check(self, "tracking")


@dataclass(frozen=True, slots=True)
class StoppingSettings:
    """Settings of the rule that ends trials early, at rungs (``plait.search.stopping``); conf/search/stopping
    says what each key means to which rule.

    Rungs come from ``rungs``, from ``every``, or from ``min_steps`` times powers of ``eta``; if none of these
    is set, they are derived from the budgets. Those below 1 are shares of each trial's own steps.
    """

    kind: str = "none"
    metric: str | None = None
    direction: Annotated[str | None, one_of(*DIRECTIONS)] = None
    rungs: tuple[int | float, ...] | None = None
    every: Annotated[int | None, at_least(1)] = None
    min_steps: Annotated[int | None, at_least(1)] = None
    max_steps: Annotated[int | None, at_least(1)] = None
    eta: Annotated[int, at_least(2)] = 2
    cohort: Annotated[int | None, at_least(2)] = None
    patience: Annotated[int, at_least(1)] = 3
    min_delta: Annotated[float, at_least(0)] = 0.0
    lower: float | None = None
    upper: float | None = None
    divergence: Annotated[float | None, above(1)] = None
    divergence_from: Annotated[str, one_of("best", "start")] = "best"
    pruner: str = "MedianPruner"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check(self, "search.stopping")
        given = [key for key in ("rungs", "every", "min_steps") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ConfigError(
                " and ".join(f"search.stopping.{key}={getattr(self, key)}" for key in given),
                "Each of these settings defines the rungs.",
                "Set only one of them.",
            )
        rungs = self.rungs or ()
        if rungs and max(rungs) == 1 and any(isinstance(each, float) for each in rungs):
            raise ConfigError(
                f"search.stopping.rungs={as_written(list(rungs))}",
                "A rung at 1.0 is the end of training, where nothing is left to stop.",
                "Give smaller shares, as [0.125,0.25,0.5], or whole numbers of optimiser steps, as [1].",
            )
        if any(each < 1 for each in rungs) != self.by_share or any(each >= 1 and each % 1 for each in rungs):
            raise ConfigError(
                f"search.stopping.rungs={as_written(list(rungs))}",
                "Rungs are either whole numbers of optimiser steps, or shares of each trial's own steps, "
                "between 0 and 1.",
                "Set [5,10,20] or [0.125,0.25,0.5], for example.",
            )
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ConfigError(
                f"search.stopping.lower={self.lower}, search.stopping.upper={self.upper}",
                "The metric must stay between them, so lower must not be above upper.",
                "Swap them.",
            )

    @property
    def active(self) -> bool:
        """Whether there are rungs at which trials may end early."""
        return self.kind != "none"

    @property
    def by_share(self) -> bool:
        """Whether the given rungs are shares of each trial's own steps."""
        rungs = self.rungs or ()
        return bool(rungs) and all(0 < each < 1 for each in rungs)

    @property
    def placed(self) -> bool:
        """Whether the settings say where rungs are."""
        return any(getattr(self, key) is not None for key in ("rungs", "every", "min_steps", "max_steps"))


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The search: how many trials, which sampler suggests them, which objectives they have; conf/search says
    what each key means.

    Attributes:
        sampler: name of a registered sampler (``plait.search.samplers``).
        metric: a metric of ``plait.tracking.names`` or a numeric config key of the job; a list for several.
        params, default_params: search spaces in override syntax, by config key.
    """

    name: Annotated[str | None, NOT_BLANK] = None
    trials: Annotated[int, at_least(1)] = 8
    parallel: Annotated[int, at_least(1)] = 8
    sampler: str = "tpe"
    sampler_options: dict[str, Any] = field(default_factory=dict, hash=False)
    seed: int = 0
    direction: Annotated[str | tuple[str, ...] | None, EACH_DIRECTION] = None
    metric: str | tuple[str, ...] = "eval/loss"
    constraints: dict[str, str] = field(default_factory=dict, hash=False)
    enqueue: tuple[dict[str, str], ...] = field(default=(), hash=False)
    prior: str | None = None
    storage: str | None = None
    params: dict[str, str] = field(default_factory=dict, hash=False)
    default_params: dict[str, str] = field(default_factory=dict, hash=False)
    fresh: bool = False
    failed: Annotated[str, one_of("keep", "retry", "drop")] = "keep"
    max_failure_rate: Annotated[float, between(0, 1)] = 1.0
    stopping: StoppingSettings = field(default_factory=StoppingSettings)

    def __post_init__(self) -> None:
        check(self, "search")
        self._check_objectives()
        if len(self.enqueue) > self.trials:
            raise ConfigError(
                f"search.enqueue has {len(self.enqueue)} points, search.trials={self.trials}",
                "Enqueued points count as trials.",
                f"Set search.trials={len(self.enqueue)} or more, or enqueue fewer points.",
            )

    def _check_objectives(self) -> None:
        for key in ("metric", "direction"):  # a list of one means its element
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) == 1:
                object.__setattr__(self, key, value[0])
        metrics, directions = self._metrics, self._directions
        usual = (Objective.usual(each).direction for each in metrics)
        if not metrics or len(set(metrics)) < len(metrics):
            raise ConfigError(
                f"search.metric={list(metrics)}",
                "A search needs at least one objective, and each may be named only once.",
            )
        if len(directions) != len(metrics):
            raise ConfigError(
                f"search.direction={list(directions)} with search.metric={list(metrics)}",
                "Give one direction for each objective, or one for all.",
                f"Set search.direction=[{','.join(usual)}], for example.",
            )
        for metric, text in self.constraints.items():
            Constraint.read(metric, text)

    @property
    def _metrics(self) -> tuple[str, ...]:
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def _directions(self) -> tuple[str, ...]:
        given = self.direction
        if given is None:
            return tuple(Objective.usual(metric).direction for metric in self._metrics)
        return (given,) * len(self._metrics) if isinstance(given, str) else given

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What is optimised; rungs compare the first one by default."""
        return tuple(map(Objective, self._metrics, self._directions))

    @property
    def limits(self) -> tuple[Constraint, ...]:
        """The constraints."""
        return tuple(Constraint.read(metric, text) for metric, text in self.constraints.items())


@dataclass(frozen=True, slots=True)
class RunSettings:
    """All settings of one run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    search: SearchSettings = field(default_factory=SearchSettings)

    def __post_init__(self) -> None:
        self._check_quantised()
        if not (capacities := self.cluster.replica_capacities):
            return
        if self.cluster.redeploy:
            capacities = (self.engine.capacity or sum(self.cluster.capacities),)
        if self.engine.capacity not in (None, max(capacities)):
            given = list(self.cluster.capacities)
            raise ConfigError(
                f"engine.capacity={self.engine.capacity} with cluster.capacities={given}",
                "The capacity of the run is the largest of cluster.capacities, which add up in a replica.",
                "Leave engine.capacity out.",
            )
        object.__setattr__(self, "engine", replace(self.engine, capacity=max(capacities)))

    def _check_quantised(self) -> None:
        cut = [self.cluster.slicing] if self.cluster.slicing else []
        cut += ["cluster.shard_base=true"] * self.cluster.shard_base
        if self.model.quantise != WHOLE and cut:
            raise ConfigError(
                f"model.quantise={self.model.quantise} with {cut[0]}",
                "Slices and shards of layers are cut from weights in the dtype, not from quantised ones.",
                "Leave one of them out, or use cluster.pipeline.",
            )

    @property
    def most_jobs(self) -> int:
        """How many jobs may train at once, as far as memory allows."""
        return min(self.search.parallel, self.planner.max_jobs or self.search.parallel)

    @property
    def capacity_key(self) -> str:
        """The key that sets the run's capacity."""
        return "cluster.capacities" if self.cluster.capacities else "engine.capacity"


Mode = Literal["train", "plan", "profile", "data", "simulate", "bench"]

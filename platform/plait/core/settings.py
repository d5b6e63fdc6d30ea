"""Settings of a run (not of a job) as frozen dataclasses: what ``conf/`` becomes at the edge.

``model``, ``engine``, ``planner``, ``cluster``, ``tracking`` and ``search`` belong to the run; sweeping
one of them is refused. ``plait.config.build`` builds these from Hydra's DictConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from plait.core.errors import ConfigError, choices
from plait.core.objectives import Constraint, Objective

MODEL_KINDS = ("smollm2", "hf", "gguf", "tiny")
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("auto", "reference", "grouped", "triton")
USUAL_CAPACITY = 2048  # tokens of a microbatch where nothing has been measured
SAMPLERS = ("tpe", "random", "grid", "cmaes", "qmc", "gp", "nsgaii")
DIRECTIONS = ("minimize", "maximize")
STOPPING = (
    "none",
    "successive_halving",
    "hyperband",
    "asha",
    "median",
    "patience",
    "threshold",
    "divergence",
    "optuna",
)


def _one_of(key: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ConfigError(f"{key}={value!r}", f"{key} must be one of {choices(names)}.")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{key}={value!r}", f"{key} must be at least {least}.")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which frozen base model.

    Attributes:
        kind: "smollm2" (the default wheel), "hf" (hub id or folder), "gguf" (a file), "tiny" (random).
        id: hub id or folder (hf).
        path: file (gguf).
        family: architecture of a tiny model: llama, qwen3, mistral, gemma2, gemma3, phi3, granite, cohere,
            gpt_neox, gpt2.
        dtype: of the frozen weights and of the arithmetic.
        max_length: longest sample in tokens; None takes the model's own limit.
        revision: hub revision (hf).
        seed: of a tiny model's random weights.
    """

    kind: str = "smollm2"
    id: str | None = None
    path: str | None = None
    family: str = "llama"
    dtype: str = "bfloat16"
    max_length: int | None = None
    revision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("model.kind", self.kind, MODEL_KINDS)
        _one_of("model.dtype", self.dtype, DTYPES)
        _at_least("model.max_length", self.max_length, 2)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How microbatches are executed.

    Attributes:
        kernels: backend of the LoRA part.
        capacity: most tokens of one microbatch; None: as the stored profile found best, else
            ``USUAL_CAPACITY``, and at least the longest sample.
        threads: CPU threads; None takes all cores.
        checkpointing: recompute activations in the backward pass.
        device: "auto", "cpu" or "cuda".
        checkpoint_steps: a job's state is saved every so many of its steps; None: not by steps.
        checkpoint_minutes: and when the last state is so many minutes old; None: not by time.
        checkpoint_keep: states of a job that are kept, so that a damaged one has one before it.
    """

    kernels: str = "auto"
    capacity: int | None = None
    threads: int | None = None
    checkpointing: bool = False
    device: str = "auto"
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = 5.0
    checkpoint_keep: int = 2

    def __post_init__(self) -> None:
        _one_of("engine.kernels", self.kernels, KERNELS)
        _one_of("engine.device", self.device, ("auto", "cpu", "cuda"))
        _at_least("engine.capacity", self.capacity, 2)
        _at_least("engine.threads", self.threads, 1)
        _at_least("engine.checkpoint_steps", self.checkpoint_steps, 1)
        _at_least("engine.checkpoint_minutes", self.checkpoint_minutes, 0.0)
        _at_least("engine.checkpoint_keep", self.checkpoint_keep, 1)

    @property
    def capacity_or_usual(self) -> int:
        """The capacity; the usual one where it is open."""
        return USUAL_CAPACITY if self.capacity is None else self.capacity


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How jobs are admitted and packed.

    Attributes:
        max_jobs: most jobs that train at once; None leaves it to memory.
        memory_share: share of the device's memory that may be used.
        min_fill: share of the microbatches' capacity below which some jobs rest for an iteration, so that
            the others' are fuller; 0 lets nobody rest. Nor does anybody where all trials train at once.
    """

    max_jobs: int | None = None
    memory_share: float = 0.8
    min_fill: float = 0.0

    def __post_init__(self) -> None:
        _at_least("planner.max_jobs", self.max_jobs, 1)
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"planner.memory_share={self.memory_share}", "It must lie in (0, 1].")
        if not 0 <= self.min_fill <= 1:
            raise ConfigError(
                f"planner.min_fill={self.min_fill}",
                "It must lie in [0, 1].",
                "Give 0.95, or 0 so that every job takes part in every iteration.",
            )


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The machine: "local" is found out."""

    kind: str = "local"
    options: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    """Where losses, throughput and adapters go.

    Attributes:
        uri: MLflow tracking URI; None takes MLFLOW_TRACKING_URI, else SQLite under ``root``.
        experiment: MLflow experiment.
        flush_seconds: time that a point waits so that several are sent together; longer where sending would
            take more than 2 % of the time.
        points: about how many steps of each curve are sent; evaluations and objectives are all sent.
        root: folder of the default SQLite files, artifacts, checkpoints and exported adapters.
    """

    uri: str | None = None
    experiment: str = "plait"
    flush_seconds: float = 2.0
    points: int = 320
    root: Path = Path("plait-runs")

    def __post_init__(self) -> None:
        _at_least("tracking.flush_seconds", self.flush_seconds, 0.0)
        _at_least("tracking.points", self.points, 1)


@dataclass(frozen=True, slots=True)
class StoppingSettings:
    """Which trials end early, judged at rungs (``plait.search.stopping``).

    Rungs come from ``rungs``, or ``every``, or ``min_steps`` times powers of ``eta``; what is None is made of
    the smallest budget.

    Attributes:
        kind: the rule; "none" has no rungs.
        metric: judged at rungs; None takes ``search.metric``.
        direction: None takes ``search.direction`` for ``search.metric``, else the metric's natural one.
        rungs: optimiser steps.
        every: optimiser steps from rung to rung.
        min_steps: the first rung.
        max_steps: no rung comes later.
        eta: one of eta is kept, and a rung lies at eta times the steps of the one before.
        cohort: trials that are compared with each other; None takes eta to the number of rungs.
        patience: rungs in a row without improvement.
        min_delta: what counts as improvement.
        lower, upper: the metric must stay between them.
        divergence: a loss above this many times its best (or its first) at a rung has diverged.
        divergence_from: "best" or "start".
        pruner: class of ``optuna.pruners``, for the kind "optuna".
        options: its keyword arguments.
    """

    kind: str = "none"
    metric: str | None = None
    direction: str | None = None
    rungs: tuple[int, ...] | None = None
    every: int | None = None
    min_steps: int | None = None
    max_steps: int | None = None
    eta: int = 2
    cohort: int | None = None
    patience: int = 3
    min_delta: float = 0.0
    lower: float | None = None
    upper: float | None = None
    divergence: float | None = None
    divergence_from: str = "best"
    pruner: str = "MedianPruner"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _one_of("search.stopping.kind", self.kind, STOPPING)
        _one_of("search.stopping.divergence_from", self.divergence_from, ("best", "start"))
        if self.direction is not None:
            _one_of("search.stopping.direction", self.direction, DIRECTIONS)
        least = {
            "every": 1,
            "min_steps": 1,
            "max_steps": 1,
            "eta": 2,
            "cohort": 2,
            "patience": 1,
            "min_delta": 0,
        }
        for key, value in least.items():
            _at_least(f"search.stopping.{key}", getattr(self, key), value)
        if self.divergence is not None and self.divergence <= 1:
            raise ConfigError(
                f"search.stopping.divergence={self.divergence}", "It must be above 1: times the loss's best."
            )
        given = [key for key in ("rungs", "every", "min_steps") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ConfigError(
                " and ".join(f"search.stopping.{key}={getattr(self, key)}" for key in given),
                "Each of them says where the rungs are.",
                "Give one of them.",
            )
        if self.kind == "threshold" and self.lower is None and self.upper is None:
            raise ConfigError("search.stopping.kind=threshold", "It needs search.stopping.lower or upper.")
        if self.kind == "divergence" and self.divergence is None:
            raise ConfigError("search.stopping.kind=divergence", "It needs search.stopping.divergence.")


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The search: how many trials, drawn how, judged by what.

    Attributes:
        name: names the search; None takes a digest of job space and run settings.
        trials: how many trials in all.
        parallel: most trials that train at once (one joint group).
        sampler: tpe, random, grid, cmaes, qmc, gp or nsgaii.
        sampler_options: keyword arguments of the Optuna sampler.
        seed: of the sampler.
        direction: "minimize" or "maximize": for every objective, or a list with one for each.
        metric: the objective: a metric of ``plait.tracking.names``, "eval/loss" by default, or a numeric
            config key of the job; a list for several.
        constraints: "<= 32" or ">= 4", by metric or numeric config key: a trial that breaks one is never
            called best.
        enqueue: points that come first, by config key, as override text; the sampler draws what they leave
            out.
        prior: an earlier study whose finished trials the sampler knows of.
        prior_storage: of that study; None: the same as this one's.
        storage: None (a journal file under ``tracking.root``), a path or a database URL.
        params: search space in override syntax, by config key.
        default_params: the space used where neither the command line nor ``params`` gives one.
        fresh: start the search anew under the same name.
        failed: what becomes of trials that failed: "keep", "retry" (when the search goes on, each is tried
            once more as a trial of its own) or "drop" (others are drawn in their place).
        max_failure_rate: the search ends early when more than this share of its trials failed.
        stopping: which trials end early.
    """

    name: str | None = None
    trials: int = 8
    parallel: int = 8
    sampler: str = "tpe"
    sampler_options: dict[str, Any] = field(default_factory=dict, hash=False)
    seed: int = 0
    direction: str | tuple[str, ...] = "minimize"
    metric: str | tuple[str, ...] = "eval/loss"
    constraints: dict[str, str] = field(default_factory=dict, hash=False)
    enqueue: tuple[dict[str, str], ...] = field(default=(), hash=False)
    prior: str | None = None
    prior_storage: str | None = None
    storage: str | None = None
    params: dict[str, str] = field(default_factory=dict, hash=False)
    default_params: dict[str, str] = field(default_factory=dict, hash=False)
    fresh: bool = False
    failed: str = "keep"
    max_failure_rate: float = 1.0
    stopping: StoppingSettings = field(default_factory=StoppingSettings)

    def __post_init__(self) -> None:
        _one_of("search.sampler", self.sampler, SAMPLERS)
        self._check_objectives()
        _one_of("search.failed", self.failed, ("keep", "retry", "drop"))
        _at_least("search.trials", self.trials, 1)
        _at_least("search.parallel", self.parallel, 1)
        if not 0 <= self.max_failure_rate <= 1:
            raise ConfigError(f"search.max_failure_rate={self.max_failure_rate}", "It must lie in [0, 1].")
        if len(self.enqueue) > self.trials:
            raise ConfigError(
                f"search.enqueue has {len(self.enqueue)} points, search.trials={self.trials}",
                "Points that come first are trials of the search.",
                f"Give search.trials={len(self.enqueue)} or more, or fewer points.",
            )

    def _check_objectives(self) -> None:
        for key in ("metric", "direction"):  # a list of one is that one
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) == 1:
                object.__setattr__(self, key, value[0])
        metrics, directions = self._metrics, self._directions
        for direction in directions:
            _one_of("search.direction", direction, DIRECTIONS)
        if not metrics or len(set(metrics)) < len(metrics):
            raise ConfigError(f"search.metric={list(metrics)}", "Each objective is named once.")
        if len(directions) != len(metrics):
            raise ConfigError(
                f"search.direction={list(directions)} with search.metric={list(metrics)}",
                "There is one direction for each objective, or one for all.",
                f"Give search.direction=[{','.join(['minimize'] * len(metrics))}], for example.",
            )
        for metric, text in self.constraints.items():
            Constraint.read(metric, text)

    @property
    def _metrics(self) -> tuple[str, ...]:
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def _directions(self) -> tuple[str, ...]:
        given = self.direction
        return (given,) * len(self._metrics) if isinstance(given, str) else given

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What is optimised; the first one is what rungs judge by default."""
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

    @property
    def planner_of_search(self) -> PlannerSettings:
        """The planner's, for the trials of the search.

        Where all train at once nobody rests: without a queue nothing takes the place of one that comes to its
        rung before the others, and it would be parked for nothing.
        """
        queue = self.search.trials > self.search.parallel
        return self.planner if queue else replace(self.planner, min_fill=0.0)


Mode = Literal["train", "plan", "profile", "simulate", "bench"]

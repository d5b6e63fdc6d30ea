"""Jobs as plain data: one adapter to train, with its optimiser settings, data and budget.

Frozen, hashable, picklable. Values are checked where they are made (``__post_init__``), so that a job
that exists is a job that can be tried. What depends on the model (a rank above a layer's size, a target
that matches nothing) is checked in ``plait.models.targets``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

from plait.core.errors import ConfigError, choices

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES = ("constant", "linear", "cosine")
Keep = Literal["last", "best"]
KEEP = ("last", "best")
MAX_SEED = 2**32 - 1  # seeds are the 32-bit key of the dropout mask (plait_kernels.dropout)


def _check(ok: bool, key: str, value: object, rule: str, remedy: str = "") -> None:
    if not ok:
        raise ConfigError(f"{key}={value!r}", f"{key} must be {rule}.", remedy)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One LoRA: its shape and where it sits.

    Attributes:
        rank: inner size, at least 1.
        alpha: numerator of the scale; None stands for ``2 * rank``.
        dropout: share of the input features dropped before A, in [0, 1).
        target_modules: as PEFT means them: names or suffixes, one regular expression (a string that is
            not "all-linear"), or "all-linear".
        rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rslora: bool = False

    def __post_init__(self) -> None:
        _check(self.rank >= 1, "adapter.rank", self.rank, "at least 1")
        _check(
            self.alpha is None or 0 < self.alpha < inf,
            "adapter.alpha",
            self.alpha,
            "above 0 and finite, or null for 2·rank",
        )
        _check(0.0 <= self.dropout < 1.0, "adapter.dropout", self.dropout, "in [0, 1)")
        _check(
            len(self.target_modules) > 0,
            "adapter.target_modules",
            self.target_modules,
            "a list of module names, a regular expression or 'all-linear'",
        )

    @property
    def scale(self) -> float:
        """s = alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return float(alpha / (self.rank**0.5 if self.rslora else self.rank))


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Optimiser, schedule, batch and budget of one job. Exactly one of ``steps`` and ``epochs`` is set.

    Attributes:
        lr: peak learning rate of A, and of B where ``lora_plus_ratio`` is 1.
        lora_plus_ratio: learning rate of B over that of A (LoRA+).
        warmup_steps: optimiser steps of linear warm-up; a value below 1 is a share of all steps.
        clip_norm: largest gradient norm over all of the adapter's tensors, or None.
        batch_size: samples of one accumulation turn.
        accumulation: turns of one optimiser step; the global batch has ``batch_size * accumulation``.
        eval_every: optimiser steps between evaluations; 0 evaluates only at the end.
        seed: order of the data, initial weights and dropout.
        priority: jobs of higher priority are admitted first.
        keep: whose weights the adapter has at the end: those of the last step, or of the evaluation with the
            lowest validation loss.
    """

    lr: float = 2e-4
    lora_plus_ratio: float = 1.0
    schedule: Schedule = "constant"
    warmup_steps: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    batch_size: int = 4
    accumulation: int = 1
    steps: int | None = 40
    epochs: float | None = None
    eval_every: int = 0
    seed: int = 0
    priority: int = 0
    keep: Keep = "last"

    def __post_init__(self) -> None:
        _check(0 < self.lr < inf, "train.lr", self.lr, "above 0 and finite")
        _check(
            0 < self.lora_plus_ratio < inf,
            "train.lora_plus_ratio",
            self.lora_plus_ratio,
            "above 0 and finite",
        )
        _check(self.schedule in SCHEDULES, "train.schedule", self.schedule, f"one of {choices(SCHEDULES)}")
        _check(0 <= self.warmup_steps < inf, "train.warmup_steps", self.warmup_steps, "0 or more and finite")
        _check(0 <= self.weight_decay < inf, "train.weight_decay", self.weight_decay, "0 or more and finite")
        _check(
            len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas),
            "train.betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        _check(0 < self.eps < inf, "train.eps", self.eps, "above 0 and finite")
        _check(
            self.clip_norm is None or self.clip_norm > 0, "train.clip_norm", self.clip_norm, "above 0 or null"
        )
        _check(self.batch_size >= 1, "train.batch_size", self.batch_size, "at least 1")
        _check(self.accumulation >= 1, "train.accumulation", self.accumulation, "at least 1")
        _check(
            (self.steps is None) != (self.epochs is None),
            "train.steps",
            f"{self.steps}, train.epochs={self.epochs}",
            "set, or train.epochs, and not both",
            "Set one of them and give null to the other.",
        )
        _check(self.steps is None or self.steps >= 1, "train.steps", self.steps, "at least 1")
        _check(
            self.epochs is None or 0 < self.epochs < inf, "train.epochs", self.epochs, "above 0 and finite"
        )
        _check(self.eval_every >= 0, "train.eval_every", self.eval_every, "0 or more")
        _check(self.keep in KEEP, "train.keep", self.keep, f"one of {choices(KEEP)}")
        _check(0 <= self.seed <= MAX_SEED, "train.seed", self.seed, f"between 0 and {MAX_SEED}")

    @property
    def global_batch(self) -> int:
        """Samples of one optimiser step."""
        return self.batch_size * self.accumulation


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where a job's samples come from: a source by name, and its options as one JSON object.

    ``options`` is JSON with sorted keys, so that equal settings are equal values and hash alike; the
    sources in ``plait.data`` turn it into dataclasses of their own and check it there.
    """

    source: str
    options: str = "{}"

    @classmethod
    def of(cls, source: str, **options: Any) -> DataSpec:
        """A spec from keyword options."""
        return cls(source, json.dumps(options, sort_keys=True))

    def mapping(self) -> dict[str, Any]:
        """The options as a dictionary."""
        loaded: dict[str, Any] = json.loads(self.options)
        return loaded


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job. ``name`` is unique in its search (a search names trial 7 "trial-0007")."""

    name: str
    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    data: DataSpec = field(default_factory=lambda: DataSpec("reasoning_gym"))

    def parameters(self) -> dict[str, Any]:
        """Config keys that define the job, as MLflow and the leaderboard show them.

        ``train.keep`` is among them where it is not the usual "last": searches from before it was there keep
        their names.
        """
        flat = {f"adapter.{key}": value for key, value in asdict(self.adapter).items()}
        flat |= {f"train.{key}": value for key, value in asdict(self.train).items()}
        if self.train.keep == "last":
            del flat["train.keep"]
        flat["data.source"] = self.data.source
        flat |= {f"data.{key}": value for key, value in self.data.mapping().items()}
        return flat

"""Jobs as plain data: one adapter to train, with its optimiser settings, data and budget.

They are frozen, hashable and picklable. Values are checked when an instance is made (``__post_init__``), so
every job that exists can be tried. What depends on the model (a target that matches nothing) is checked in
``plait.models.targets``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from plait.core.checks import FRACTION, NOT_EMPTY, Rule, above, at_least, between, check
from plait.core.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]
Keep = Literal["last", "best", "best_accuracy"]
MAX_SEED = 2**32 - 1  # seeds are the 32-bit key of the dropout mask (plait_kernels.dropout)
USEFUL_RANK = Rule("at most 65536, since no layer is as wide", lambda value: value <= 65_536)
Seed = Annotated[int, between(0, MAX_SEED)]
BETAS = Rule(
    "two numbers in [0, 1)",
    lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
)
USUAL_STEPS = 40  # optimiser steps of a job if neither steps nor epochs are given


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter: its shape and the modules that it adapts.

    Attributes:
        rank: inner dimension, at least 1.
        alpha: numerator of the scale; None means ``2 * rank``.
        dropout: share of the input features dropped before A, in [0, 1).
        target_modules: as in PEFT: names or suffixes, one regular expression (a string that is not
            "all-linear"), or "all-linear".
        rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
        variant: what is trained and how it is used, by its name in ``plait.adapters.variants``.
    """

    rank: Annotated[int, at_least(1), USEFUL_RANK] = 16
    alpha: Annotated[float | None, above(0)] = None
    dropout: Annotated[float, FRACTION] = 0.0
    target_modules: Annotated[str | tuple[str, ...], NOT_EMPTY] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rslora: bool = False
    variant: str = "lora"

    def __post_init__(self) -> None:
        check(self, "adapter")

    @property
    def scale(self) -> float:
        """s = alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return float(alpha / (self.rank**0.5 if self.rslora else self.rank))


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Optimiser, schedule, batch and budget of one job. Exactly one of ``steps`` and ``epochs`` is set;
    if neither is given, ``steps`` becomes ``USUAL_STEPS``.

    Attributes:
        lr: peak learning rate of A, and of B if ``lora_plus_ratio`` is 1.
        lora_plus_ratio: learning rate of B divided by that of A (LoRA+).
        warmup_steps: optimiser steps of linear warm-up; a value below 1 is a share of all steps.
        clip_norm: largest gradient norm over all of the adapter's tensors, or None.
        batch_size: samples of one accumulation step.
        accumulation: accumulation steps per optimiser step; a global batch has
            ``batch_size * accumulation`` samples.
        eval_every: optimiser steps between evaluations; 0 evaluates only at the end.
        seed: seed of the data order, the initial weights and dropout.
        priority: jobs of higher priority are admitted first.
        keep: which weights the adapter has at the end: those of the last step, or those of the evaluation
            with the lowest validation loss, or with the highest accuracy of generated answers.
    """

    lr: Annotated[float, above(0)] = 2e-4
    lora_plus_ratio: Annotated[float, above(0)] = 1.0
    schedule: Schedule = "constant"
    warmup_steps: Annotated[float, at_least(0)] = 0.0
    weight_decay: Annotated[float, at_least(0)] = 0.0
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.999)
    eps: Annotated[float, above(0)] = 1e-8
    clip_norm: Annotated[float | None, above(0)] = 1.0
    batch_size: Annotated[int, at_least(1)] = 4
    accumulation: Annotated[int, at_least(1)] = 1
    steps: Annotated[int | None, at_least(1)] = None
    epochs: Annotated[float | None, above(0)] = None
    eval_every: Annotated[int, at_least(0)] = 0
    seed: Seed = 0
    priority: int = 0
    keep: Keep = "last"

    def __post_init__(self) -> None:
        check(self, "train")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", USUAL_STEPS)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"train.steps={self.steps}, train.epochs={self.epochs}",
                "Only one of the two may be set.",
                "Leave one out, or set it to null.",
            )

    @property
    def global_batch(self) -> int:
        """Samples of one optimiser step."""
        return self.batch_size * self.accumulation


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Where a job's samples come from: the name of a source, and its options as one JSON object.

    ``options`` is JSON with sorted keys, so that equal settings are equal values and hash alike; the
    sources in ``plait.data`` turn it into their own dataclasses, which check it.
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
        """Values of the config keys that define the job, as MLflow and the leaderboard show them."""
        flat = {f"adapter.{key}": value for key, value in asdict(self.adapter).items()}
        flat |= {f"train.{key}": value for key, value in asdict(self.train).items()}
        flat["data.source"] = self.data.source
        flat |= {f"data.{key}": value for key, value in self.data.mapping().items()}
        return flat

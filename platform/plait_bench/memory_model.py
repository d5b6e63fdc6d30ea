"""Memory predicted from a dozen probes against held-out microbatches, beside mLoRA's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import LlamaConfig

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.figures import Figure, How, Report
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.fake_memory import observe_extrapolated
from plait.cost.memory import MemoryModel, MemoryObservation
from plait.cost.probes import Probe, ProbeOptions, drawn_probe, observe_device, probe_grid
from plait.models import BaseModel, load_model
from plait.utils.benchmarks import BENCHMARKS
from plait.utils.paths import cache_dir
from plait_kernels.loss import CHUNK_LOGITS

SOURCE = "mLoRA §4.2, figure 8a"


@dataclass(frozen=True, slots=True)
class Options:
    """Of the benchmark.

    Attributes:
        mape_percent: published.
        capacity: most tokens of a microbatch without weights.
        measured_capacity: most tokens of one that is measured.
        held_out: microbatches that are not fitted to.
        seed: of what is held out.
        measured: whether the run's own model is measured on this device as well.
        shapes: sizes of a LlamaConfig by name; no weights are needed.
    """

    mape_percent: float
    capacity: int
    measured_capacity: int
    held_out: int
    seed: int
    measured: bool
    shapes: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        for name in ("capacity", "measured_capacity"):
            if getattr(self, name) < 128:
                raise ConfigError(f"bench.options.{name}={getattr(self, name)}", "It must be at least 128.")
        if self.held_out < 1 or self.seed < 0:
            raise ConfigError(
                f"bench.options.held_out={self.held_out}, seed={self.seed}",
                "One microbatch at least is held out, and the seed is at least 0.",
            )


def _config(name: str, sizes: Mapping[str, Any]) -> LlamaConfig:
    path = f"bench.options.shapes.{name}"
    for key, value in sizes.items():
        if not isinstance(value, bool) and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{path}.{key}={value!r}", "A size must be a whole number of at least 1.")
    try:
        return LlamaConfig(**sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", "They must be sizes of a Llama.") from error


@BENCHMARKS.register("mlora/memory_model")
def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Mean absolute error of peak − static on held-out ragged microbatches, in percent.

    Raises:
        ConfigError: a wrong option, or sizes of which there is no model.
    """
    del jobs
    asked = build(Options, options, "bench.options")
    configs = {name: _config(name, sizes) for name, sizes in asked.shapes.items()}
    figures = []
    for name, config in configs.items():
        for checkpointing in (False, True):
            grid, held = _probes(asked, asked.capacity)
            observed = observe_extrapolated(config, [*grid, *held], _engine(checkpointing))
            case = f"{name}, without weights{', checkpointing' * checkpointing}"
            figures += _figures(case, observed, len(grid), config.vocab_size, "computed", asked)
    if asked.measured:
        model = load_model(settings.model, cache=cache_dir(), device="cpu")
        for checkpointing in (False, True):
            figures += _measured(model, checkpointing, asked)
    return Report(
        "Memory of packed microbatches: error on held-out points",
        tuple(figures),
        (
            "Fitted to 12 probes; held out: 1 to 4 adapters, ranks 4 to 64, lognormal lengths (sigma 0.6, "
            "means 80, 200, 500), 10 to 100 % of the tokens labelled.",
            "Errors are of peak − static. Eq. 5 of mLoRA is the same fit with Σℓ and Σℓ² alone.",
        ),
    )


def _measured(model: BaseModel, checkpointing: bool, options: Options) -> list[Figure]:
    grid, held = _probes(options, options.measured_capacity)
    observed = observe_device(model, [*grid, *held], _engine(checkpointing))
    case = f"{model.identity.name}, on {model.device}{', checkpointing' * checkpointing}"
    return _figures(case, observed, len(grid), model.vocabulary, "measured", options)


def _engine(checkpointing: bool) -> ProbeOptions:
    return ProbeOptions(checkpointing=checkpointing)


def _figures(
    case: str,
    observed: Sequence[MemoryObservation],
    fitted: int,
    vocabulary: int,
    how: How,
    options: Options,
) -> list[Figure]:
    model = MemoryModel.fitted(observed[:fitted], logit_rows=CHUNK_LOGITS // vocabulary)
    errors = 100.0 * np.abs(model.errors(observed[fitted:]))
    simple = 100.0 * np.abs(_eq5(observed[:fitted]).errors(observed[fitted:]))
    peak = max(each.dynamic + each.static for each in observed[fitted:]) / 2**30
    note = f"largest error {errors.max():.3g} %; largest peak {peak:.2f} GiB"
    return [
        Figure(case, float(errors.mean()), "%", how, options.mape_percent, SOURCE, note=note),
        Figure(f"{case}: Eq. 5 alone", float(simple.mean()), "%", how, options.mape_percent, SOURCE),
    ]


def _eq5(observed: Sequence[MemoryObservation]) -> MemoryModel:
    """mLoRA's β0 + β1·Σℓ + β2·Σℓ²: one phase, and no other feature."""
    bare = [
        MemoryObservation(
            type(each.shape)(each.shape.tokens, 0, each.shape.squares, 0, 0),
            {"whole": max(each.peaks.values())},
            each.static,
        )
        for each in observed
    ]
    return MemoryModel.fitted(bare)


def _probes(options: Options, capacity: int) -> tuple[tuple[Probe, ...], list[Probe]]:
    rng = np.random.default_rng(options.seed)
    return probe_grid(capacity), [drawn_probe(rng, capacity) for _ in range(options.held_out)]

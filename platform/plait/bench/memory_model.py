"""Memory predicted from a dozen probes against held-out microbatches, beside mLoRA's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from transformers import LlamaConfig

from plait.bench.figures import Figure, How, Report
from plait.cost.fake_memory import observe_extrapolated
from plait.cost.memory import MemoryModel, MemoryObservation
from plait.cost.memory_probe import Probe, ProbeOptions, drawn_probe, observe_device, probe_grid
from plait.jobs import JobSpec
from plait.models import BaseModel, load_model
from plait.paths import cache_dir
from plait.settings import RunSettings
from plait_kernels.loss import CHUNK_LOGITS

SOURCE = "mLoRA §3.4"


def run(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Mean absolute error of peak − static on held-out ragged microbatches, in percent.

    Options: ``shapes`` (name: LlamaConfig sizes; without weights), ``measured`` (whether the run's own
    model is measured on this device as well), ``capacity``, ``measured_capacity``, ``held_out``, ``seed``,
    ``mape_percent`` (published).
    """
    del jobs
    figures = []
    for name, sizes in cast("Mapping[str, Mapping[str, Any]]", options["shapes"]).items():
        config = LlamaConfig(**sizes)
        for checkpointing in (False, True):
            grid, held = _probes(options, "capacity")
            observed = observe_extrapolated(config, [*grid, *held], _engine(checkpointing))
            case = f"{name}, without weights{', checkpointing' * checkpointing}"
            figures += _figures(case, observed, len(grid), config.vocab_size, "computed", options)
    if options["measured"]:
        model = load_model(settings.model, cache=cache_dir(), device="cpu")
        for checkpointing in (False, True):
            figures += _measured(model, checkpointing, options)
    return Report(
        "Memory of packed microbatches: error on held-out points",
        tuple(figures),
        (
            "Fitted to 12 probes; held out: 1 to 4 adapters, ranks 4 to 64, lognormal lengths (sigma 0.6, "
            "means 80, 200, 500), 10 to 100 % of the tokens labelled.",
            "Errors are of peak − static. Eq. 5 of mLoRA is the same fit with Σℓ and Σℓ² alone.",
        ),
    )


def _measured(model: BaseModel, checkpointing: bool, options: Mapping[str, object]) -> list[Figure]:
    grid, held = _probes(options, "measured_capacity")
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
    options: Mapping[str, object],
) -> list[Figure]:
    model = MemoryModel.fitted(observed[:fitted], logit_rows=CHUNK_LOGITS // vocabulary)
    errors = 100.0 * np.abs(model.errors(observed[fitted:]))
    simple = 100.0 * np.abs(_eq5(observed[:fitted]).errors(observed[fitted:]))
    published = float(cast("float", options["mape_percent"]))
    peak = max(each.dynamic + each.static for each in observed[fitted:]) / 2**30
    note = f"largest error {errors.max():.3g} %; largest peak {peak:.2f} GiB"
    return [
        Figure(case, float(errors.mean()), "%", how, published, SOURCE, note=note),
        Figure(f"{case}: Eq. 5 alone", float(simple.mean()), "%", how, published, SOURCE),
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


def _probes(options: Mapping[str, object], capacity: str) -> tuple[tuple[Probe, ...], list[Probe]]:
    most = int(cast("int", options[capacity]))
    rng = np.random.default_rng(int(cast("int", options["seed"])))
    return probe_grid(most), [drawn_probe(rng, most) for _ in range(int(cast("int", options["held_out"])))]

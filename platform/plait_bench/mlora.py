"""mLoRA's bubble formulas compared with the simulator, and its memory model with Plait's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
from transformers import LlamaConfig

from plait.core.checks import at_least
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.cost.fake_memory import observe_extrapolated
from plait.cost.memory import MemoryModel, MemoryObservation
from plait.cost.probes import Probe, ProbeOptions, ProbeSegment, drawn_probe, observe_device, probe_grid
from plait.cost.time import StageTime
from plait.models.load import load_model
from plait.simulate.events import Order, Pipeline, Run, Work, simulate
from plait.simulate.orders import BackwardFirst, GPipe
from plait.utils.paths import cache_dir
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, How, Published, Report
from plait_bench.inputs import Count
from plait_bench.progress import part
from plait_kernels.loss import chunk_rows

SECTION_3 = "mLoRA §3.2.2"
FIGURE_8 = "mLoRA §4.2, figure 8a"


def gpipe(stages: int, split: int) -> Fraction:
    """(D − 1) / (N + D − 1): one job, N microbatches a step."""
    return Fraction(stages - 1, split + stages - 1)


def lorapp(stages: int, jobs: int, split: int) -> Fraction:
    """max((D − 1 + N − L·N) / (D + N − 1), 0): L jobs in turn in the steady state, N microbatches a step."""
    return max(Fraction(stages - 1 + split - jobs * split, stages + split - 1), Fraction(0))


def simulated_gpipe(stages: int, split: int) -> Fraction:
    """Idle share of a whole GPipe step of N equal microbatches."""
    run = _run(stages, 1, split, 1, GPipe([split]))
    return _idle(run, stages, 0, round(run.makespan))


def simulated_lorapp(stages: int, jobs: int, split: int, *, forward: int = 1, backward: int = 2) -> Fraction:
    """Idle share of LoRAPP's steady state: between two turns of the same job, after the pipeline filled."""
    turns = stages + 6
    run = _run(stages, jobs, split, turns, BackwardFirst(), forward, backward)
    starts = {span.work: round(span.start) for span in run.spans if (span.stage, span.kind) == (0, "forward")}
    begin, end = starts[(turns // 2) * jobs * split], starts[(turns - 3) * jobs * split]
    return _idle(run, stages, begin, end)


def _run(
    stages: int, jobs: int, split: int, turns: int, order: Order, forward: int = 1, backward: int = 2
) -> Run:
    works = [
        Work(((f"job{job}", turn),)) for turn in range(turns) for job in range(jobs) for _ in range(split)
    ]
    seconds = [[StageTime(forward, backward)] * len(works)] * stages
    return simulate({0: Pipeline(works, seconds, order)})


def _idle(run: Run, stages: int, begin: int, end: int) -> Fraction:
    busy = sum(round(max(0, min(span.end, end) - max(span.start, begin))) for span in run.spans)
    return 1 - Fraction(busy, stages * (end - begin))


@dataclass(frozen=True, slots=True)
class BubbleOptions:
    """Options of ``mlora/bubble_ratio``: every combination is checked, the shown ones are printed.

    Attributes:
        stages: D.
        jobs: L.
        splits: N, microbatches of one global batch.
        shown: [D, L, N] of the printed lines.
    """

    stages: tuple[int, ...]
    jobs: tuple[int, ...]
    splits: tuple[int, ...]
    shown: tuple[tuple[int, int, int], ...] = ()


@benchmark("mlora/bubble_ratio", BubbleOptions)
def bubble_ratio(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: BubbleOptions) -> Report:
    """How many of the formulas' cases the simulator meets exactly, and some of them."""
    lorapp_cases = [
        simulated_lorapp(stages, count, split) == lorapp(stages, count, split)
        for stages in asked.stages
        for count in asked.jobs
        for split in asked.splits
    ]
    gpipe_cases = [
        simulated_gpipe(stages, split) == gpipe(stages, split)
        for stages in asked.stages
        for split in asked.splits
    ]
    figures = [_met("LoRAPP cases met exactly", lorapp_cases), _met("GPipe cases met exactly", gpipe_cases)]
    for stages, count, split in asked.shown:
        name = f"LoRAPP D={stages} L={count} N={split}"
        ours, formula = simulated_lorapp(stages, count, split), lorapp(stages, count, split)
        figures.append(_share(name, ours, formula))
        if count == 1:
            ours, formula = simulated_gpipe(stages, split), gpipe(stages, split)
            figures.append(_share(f"GPipe D={stages} N={split}", ours, formula))
    notes = ("Equal microbatches, a backward twice as long as a forward, messages free; steady state.",)
    return Report("mlora/bubble_ratio", tuple(figures), notes)


def _met(name: str, cases: Sequence[bool]) -> Figure:
    share = 100 * sum(cases) / len(cases)
    note = f"{sum(cases)} of {len(cases)}"
    return Figure(name, share, "%", "simulated", Baseline(100.0, "every case", at_least=1.0), note)


def _share(name: str, ours: Fraction, formula: Fraction) -> Figure:
    return Figure(
        name,
        float(100 * ours),
        "%",
        "simulated",
        Published(float(100 * formula), f"{SECTION_3}, formula", tolerance=0.0, weak="formula"),
    )


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of ``mlora/memory_model``.

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
    capacity: Annotated[int, at_least(128)]
    measured_capacity: Annotated[int, at_least(128)]
    held_out: Count
    seed: Annotated[int, at_least(0)]
    measured: bool
    shapes: dict[str, dict[str, Any]]


def _config(name: str, sizes: Mapping[str, Any]) -> LlamaConfig:
    path = f"bench.options.shapes.{name}"
    for key, value in sizes.items():
        if not isinstance(value, bool) and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{path}.{key}={value!r}", "A size must be a whole number of at least 1.")
    try:
        return LlamaConfig(**sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", "They must be sizes of a Llama.") from error


@benchmark("mlora/memory_model", MemoryOptions)
def memory_model(settings: RunSettings, _jobs: Sequence[JobSpec], asked: MemoryOptions) -> Report:
    """Mean absolute error of peak − static on held-out ragged microbatches, in percent.

    Raises:
        ConfigError: sizes of which there is no model.
    """
    configs = {name: _config(name, sizes) for name, sizes in asked.shapes.items()}
    figures = []
    piece = part("fits", 2 * (len(configs) + asked.measured))
    for name, config in configs.items():
        for checkpointing in (False, True):
            case = f"{name}, without weights{', checkpointing' * checkpointing}"
            piece(case)
            grid, held = _probes(asked, asked.capacity)
            observed = observe_extrapolated(config, [*grid, *held], ProbeOptions(checkpointing=checkpointing))
            figures += _figures(case, observed, len(grid), config.vocab_size, "computed", asked)
    if asked.measured:
        model = load_model(settings.model, cache=cache_dir(), device="cpu")
        for checkpointing in (False, True):
            case = f"{model.identity.name}, on {model.device}{', checkpointing' * checkpointing}"
            piece(case)
            grid, held = _probes(asked, asked.measured_capacity)
            observed = observe_device(model, [*grid, *held], ProbeOptions(checkpointing=checkpointing))
            figures += _figures(case, observed, len(grid), model.vocabulary, "measured", asked)
    return Report(
        "Memory of packed microbatches: error on held-out points",
        tuple(figures),
        (
            "Fitted to 12 probes; held out: 1 to 4 adapters, ranks 4 to 64, lognormal lengths (sigma 0.6, "
            "means 80, 200, 500), 10 to 100 % of the tokens labelled.",
            "Errors are of peak − static. Eq. 5 of mLoRA is the same fit with Σℓ and Σℓ² alone.",
        ),
    )


def _figures(
    case: str,
    observed: Sequence[MemoryObservation],
    fitted: int,
    vocabulary: int,
    how: How,
    options: MemoryOptions,
) -> list[Figure]:
    model = MemoryModel.fitted(observed[:fitted], logit_rows=chunk_rows(vocabulary))
    errors = 100.0 * np.abs(model.errors(observed[fitted:]))
    simple = 100.0 * np.abs(_eq5(observed[:fitted]).errors(observed[fitted:]))
    peak = max(each.dynamic + each.static for each in observed[fitted:]) / 2**30
    # mLoRA's is of padded batches of one length, measured on a GPU.
    published = Published(options.mape_percent, FIGURE_8, sense="at most", weak="other workload")
    note = f"largest error {errors.max():.3g} %; largest peak {peak:.2f} GiB"
    return [
        Figure(case, float(errors.mean()), "%", how, published, note),
        Figure(f"{case}: Eq. 5 alone", float(simple.mean()), "%", how, published, detail=True),
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


def _probes(options: MemoryOptions, capacity: int) -> tuple[tuple[Probe, ...], list[Probe]]:
    rng = np.random.default_rng(options.seed)
    return probe_grid(capacity), [drawn_probe(rng, capacity) for _ in range(options.held_out)]


@dataclass(frozen=True, slots=True)
class PointOptions:
    """Options of ``mlora/memory_points``.

    Attributes:
        points: numbers of batches that a model is fitted to; the others are held out.
        samples: of a batch, all of one length, padded as mLoRA pads.
        lengths: tokens of a sample.
        seed: of the order in which batches are fitted to.
        shapes: sizes of a LlamaConfig by name; no weights are needed.
    """

    points: tuple[int, ...]
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    seed: int
    shapes: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        if not 1 <= min(self.points, default=0) <= max(self.points) < len(self.samples) * len(self.lengths):
            raise ConfigError(
                f"{OPTIONS}.points={list(self.points)}",
                f"At least 1 and fewer than the {len(self.samples) * len(self.lengths)} batches.",
            )


@benchmark("mlora/memory_points", PointOptions)
def memory_points(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: PointOptions) -> Report:
    """Mean absolute error of the peak, weights included, by the number of batches that were fitted to.

    Raises:
        ConfigError: sizes of which there is no model.
    """
    figures = []
    for name, sizes in asked.shapes.items():
        config = _config(name, sizes)
        batches = [(samples, length) for samples in asked.samples for length in asked.lengths]
        order = np.random.default_rng(asked.seed).permutation(len(batches))
        probes = [
            Probe((ProbeSegment(16, (length,) * samples),), samples * length)
            for samples, length in (batches[at] for at in order)
        ]
        observed = observe_extrapolated(config, probes, ProbeOptions(checkpointing=False))
        for count in asked.points:
            seen, held = observed[:count], observed[count:]
            rows = chunk_rows(config.vocab_size)
            for title, model in (("Eq. 5", _eq5(seen)), ("Plait", MemoryModel.fitted(seen, logit_rows=rows))):
                off = [
                    100 * abs(error) * each.dynamic / (each.dynamic + each.static)
                    for error, each in zip(model.errors(held), held, strict=True)
                ]
                note = f"largest {max(off):.3g} %; {len(held)} held out"
                title = f"{name}, {count} points: {title}"
                figures.append(Figure(title, float(np.mean(off)), "%", "computed", note=note))
    return Report("Error of peak memory by fitted points", tuple(figures))

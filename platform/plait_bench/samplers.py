"""`plait bench replay/samplers`: how many trials each sampler takes to a good one, on published losses.

The losses of finished runs are the oracle: a sampler suggests a learning rate and a rank from ranges on a log
scale, and gets the loss published for the nearest point of the grid. A point that diverged, or was not
published, fails. Suggestions and results go through the study that a real search uses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from plait.config.fields import build
from plait.core.errors import ConfigError, DataError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState
from plait.core.settings import RunSettings, SearchSettings
from plait.core.space import Choice, Dimension, Real, Space, Whole
from plait.search.identity import identify
from plait.search.storage import in_memory, quiet
from plait.search.study import StudyTrials
from plait.search.trials import Trial
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import OPTIONS, at_least_one, shipped
from plait_bench.progress import part

RATE, RANK = "train.lr", "adapter.rank"
Cell = tuple[float, int]  # learning rate, rank


@dataclass(frozen=True, slots=True)
class LossTable:
    """One model's losses.

    Attributes:
        model: its name.
        rates: all learning rates of the grid, rising.
        ranks: all ranks, rising.
        losses: by cell; what was run more than once counts with its mean, and what diverged or was not
            published is missing.
    """

    model: str
    rates: tuple[float, ...]
    ranks: tuple[int, ...]
    losses: Mapping[Cell, float]

    @property
    def best(self) -> float:
        """The lowest loss."""
        return min(self.losses.values())

    def good(self, within: float) -> set[Cell]:
        """Cells with a loss at most the share ``within`` above the best."""
        return {cell for cell, loss in self.losses.items() if loss <= self.best * (1 + within)}

    def nearest(self, rate: float, rank: float) -> Cell:
        """The cell of the grid that is nearest on logarithmic scales."""
        return (
            min(self.rates, key=lambda each: abs(math.log(each / rate))),
            min(self.ranks, key=lambda each: abs(math.log(each / rank))),
        )


def read_tables(path: Path) -> list[LossTable]:
    """The tables of all models, in the order of the file.

    Raises:
        DataError: the file cannot be read, or holds no such tables.
    """
    try:
        models = json.loads(path.read_text(encoding="utf-8"))["models"]
        tables = [_table(model, content) for model, content in models.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: {error}",
            "It must hold each model's learning rates, ranks and losses, as data/sft_sweep.json does.",
            "Give its path.",
        ) from error
    if not tables:
        raise DataError(f"{path}", "It holds no model.")
    return tables


def _table(model: str, content: Mapping[str, Any]) -> LossTable:
    rates, ranks = content["rates"], content["ranks"]
    losses = {
        (float(rate), int(rank)): fmean(runs)
        for rank, row in zip(ranks, content["losses"], strict=True)
        for rate, runs in zip(rates, row, strict=True)
        if runs
    }
    if not losses:
        raise ValueError(f"no losses of {model}")
    return LossTable(model, tuple(sorted(map(float, rates))), tuple(sorted(map(int, ranks))), losses)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler by name, with its options and how many seeds it is tried with; None: all."""

    sampler: str
    options: dict[str, Any] = field(default_factory=dict)
    seeds: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``replay/samplers``.

    Attributes:
        path: of the published losses, by name those that come with Plait.
        samplers: by label.
        seeds: of each sampler on each model.
        within: what counts as good: at most so much above the model's best loss, in percent.
        trials: a search that has found nothing good by then has not found it.
    """

    path: Path
    samplers: dict[str, Sampler]
    seeds: int = 20
    within: float = 0.5
    trials: int = 60

    def __post_init__(self) -> None:
        at_least_one(self, "seeds", "trials")
        if not self.samplers:
            raise ConfigError("bench.options.samplers={}", "There must be at least one sampler.")


@BENCHMARKS.register("replay/samplers")
def replay_samplers(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Search every model's table with every sampler; ``jobs`` are not used.

    Raises:
        ConfigError: an unknown option.
        DataError: the published losses are not there, or cannot be read.
        SearchError: there is no such sampler, or it does not take its options.
    """
    del jobs
    asked = build(Options, options, OPTIONS)
    tables = read_tables(shipped(asked.path))
    counts: dict[str, dict[str, list[int]]] = {}
    for label, sampler in asked.samplers.items():
        piece = part(label, len(tables))
        search = replace(
            settings.search,
            sampler=sampler.sampler,
            sampler_options=dict(sampler.options),
            trials=asked.trials,
        )
        counts[label] = {}
        for index, table in enumerate(tables):
            piece(table.model)
            # Samplers share their seeds, models do not: a lucky first draw would be lucky for all of them.
            seeds = (index + len(tables) * turn for turn in range(sampler.seeds or asked.seeds))
            counts[label][table.model] = [
                trials_to_good(table, replace(search, seed=seed), asked.within / 100) for seed in seeds
            ]
    reference = _reference(tables, asked)
    grid = Baseline(reference.ours, "points of the grid in any order, without repeating one: the mean")
    figures = [reference]
    figures += [_figure(label, found, asked.trials, grid) for label, found in counts.items()]
    figures += [_model_figure(table, counts, asked) for table in tables]
    return Report("replay/samplers", tuple(figures), _assumptions(tables, asked))


def trials_to_good(table: LossTable, search: SearchSettings, within: float) -> int:
    """How many trials until the first good one; ``search.trials`` + 1 if none of them is.

    Args:
        table: the oracle.
        search: sampler, seed and limit.
        within: what counts as good, as a share.
    """
    quiet()
    space = _space(table, search.sampler)
    identity = identify(space, JobSpec("published"), RunSettings(search=search))
    study = StudyTrials(search, space, identity, in_memory())
    good = table.good(within)
    tried = 0
    while (trial := study.ask()) is not None:
        tried += 1
        cell = table.nearest(*_point(trial))
        if cell in good:
            return tried
        loss = table.losses.get(cell)
        state, values = (JobState.FAILED, ()) if loss is None else (JobState.FINISHED, (loss,))
        study.tell(trial, JobResult(trial.name, state, reason="as published", values=values))
    return search.trials + 1


def _space(table: LossTable, sampler: str) -> Space:
    """Ranges, as one would search them; for the grid sampler, the grid."""
    if sampler == "grid":
        domains = [Choice(values, tuple(map(repr, values))) for values in (table.rates, table.ranks)]
        return Space((Dimension(RATE, domains[0]), Dimension(RANK, domains[1])))
    rates = Real(table.rates[0], table.rates[-1], log=True)
    ranks = Whole(table.ranks[0], table.ranks[-1], log=True)
    return Space((Dimension(RATE, rates), Dimension(RANK, ranks)))


def _point(trial: Trial) -> tuple[float, float]:
    rate, rank = trial.values[RATE], trial.values[RANK]
    assert isinstance(rate, float)
    assert isinstance(rank, int)
    return rate, rank


def expected_draws(cells: int, good: int) -> float:
    """Mean number of draws without replacement until the first good one."""
    return (cells + 1) / (good + 1)


def _reference(tables: Sequence[LossTable], options: Options) -> Figure:
    expected = [_expected(table, options) for table in tables]
    return Figure(
        "points of the grid in any order: mean",
        fmean(expected),
        "trials",
        "computed",
        note=f"without repeating one; models {min(expected):.3g} to {max(expected):.3g}",
    )


def _expected(table: LossTable, options: Options) -> float:
    return expected_draws(len(table.rates) * len(table.ranks), len(table.good(options.within / 100)))


def _figure(label: str, found: Mapping[str, Sequence[int]], trials: int, grid: Baseline) -> Figure:
    """All models and seeds together: what was not found stands behind the limit."""
    counts = sorted(count for counts in found.values() for count in counts)
    at = {share: counts[min(len(counts) - 1, int(share * len(counts)))] for share in (0.25, 0.75, 0.9)}
    missed = sum(count > trials for count in counts) / len(counts)
    note = f"quartiles {at[0.25]} and {at[0.75]}, 90 % {at[0.9]}, most {counts[-1]}"
    if missed:
        note += f"; {100 * missed:.2g} % not within {trials}"
    return Figure(f"{label}: median", median(counts), "trials", "simulated", grid, note)


def _model_figure(
    table: LossTable, counts: Mapping[str, Mapping[str, Sequence[int]]], options: Options
) -> Figure:
    medians = [f"{label} {median(found[table.model]):g}" for label, found in counts.items()]
    good: set[Cell] = table.good(options.within / 100)
    return Figure(
        table.model,
        _expected(table, options),
        "trials, any order",
        "computed",
        note=f"{len(good)} of {len(table.rates) * len(table.ranks)} are good; medians: {', '.join(medians)}",
    )


def _assumptions(tables: Sequence[LossTable], options: Options) -> tuple[str, ...]:
    return (
        f"Trials until the first within {options.within:g} % of a model's best published loss; {len(tables)} "
        f"models, {options.seeds} seeds unless a sampler has its own number.",
        "Losses are published, not measured here. Learning rate and rank are suggested from ranges on log "
        "scales and get the nearest point's loss, so a point may repeat; the grid sampler suggests points.",
    )

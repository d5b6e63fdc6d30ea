"""What another package would add to Plait: one choice of each kind, registered when this module is imported.

Only the processes of tests/contract/test_added_from_outside.py import it, by entry points of their own: in
the tests' process its names would stand among the choices of other tests.
"""
# ruff: noqa: ARG002 (arguments of Optuna's and Plait's protocols)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from frozen_a import FrozenA
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from plait.adapters.variants import VARIANTS
from plait.core.checks import at_least
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.data.examples import Pair
from plait.data.sources import SOURCES, CommonOptions, Rows, Source
from plait.search.rungs import RungTable
from plait.search.samplers import SAMPLERS, Sampler
from plait.search.stopping import CONTINUE, RULES, Decision, RuleRequest, StoppingRule
from plait_bench.benchmarks import benchmark
from plait_bench.figures import Figure, Report

VARIANTS.add(FrozenA.name, FrozenA())


class LastFirst(BaseSampler):
    """Suggests the values of a choice from the last to the first, ``skip`` of them left out."""

    def __init__(self, seed: int, skip: int = 0) -> None:
        self.skip = skip

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        assert isinstance(param_distribution, CategoricalDistribution)
        return param_distribution.choices[-1 - self.skip - trial.number]


SAMPLERS.add("last_first", Sampler(LastFirst, finite=True))


@dataclass(frozen=True)
class EveryNth:
    """Options of the rule."""

    nth: int


@dataclass(frozen=True)
class EveryNthRule:
    """Stops every nth trial at the first rung."""

    same: tuple[int, ...]
    nth: int

    def rungs(self, number: int, /) -> tuple[int, ...]:
        return self.same[:1]

    def decide(self, number: int, rung: int, table: RungTable) -> Decision:
        if number % self.nth != self.nth - 1:
            return CONTINUE
        return Decision("stop", f"number {number}, loss {table.records[number].values[rung]:.3g}")


def every_nth(ask: RuleRequest) -> EveryNthRule:
    return EveryNthRule(ask.rungs, ask.options.nth)


RULES.add("every_nth", StoppingRule(every_nth, options=EveryNth))


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOptions(CommonOptions):
    start: Annotated[int, at_least(1)] = 1


def read_sums(options: SumOptions) -> list[tuple[str, Pair]]:
    numbers = range(options.start, options.start + 12)
    return [(f"sums, {number}", Pair(f"{number}+{number}=", str(2 * number), "")) for number in numbers]


def open_sums(options: SumOptions) -> Rows:
    return Rows("sums", str(options.start), partial(read_sums, options))


SOURCES.add("sums", Source(SumOptions, open_sums))


@dataclass(frozen=True)
class RanksOptions:
    """Options of the benchmark."""

    title: str


@benchmark("outside/ranks", RanksOptions)
def ranks(settings: RunSettings, jobs: Sequence[JobSpec], asked: RanksOptions) -> Report:
    """The rank of each job of the search, with its variant and source of data."""
    figures = []
    for job in jobs:
        name = f"{job.name} {job.adapter.variant} {job.data.source}"
        figures.append(Figure(name, job.adapter.rank, "rank", "computed"))
    return Report(f"{asked.title}, kernels {settings.engine.kernels}", tuple(figures))

"""Optuna's samplers by name, seeded so that a search that goes on draws what it would have drawn."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from plait.core.errors import SearchError
from plait.core.settings import SearchSettings
from plait.core.space import Choice, Domain, Point, Space, Values, Whole
from plait.search.feasibility import check_sampler, grid
from plait.search.untried import REDRAWS, Untried

# A quasi-random sequence and a shuffled grid are numbered by their seed, so it must stay the same.
ONE_SEQUENCE = ("qmc", "grid")

Distributions = dict[str, BaseDistribution]


def distributions(space: Space) -> Distributions:
    """The space as Optuna knows it."""
    return {dimension.name: _distribution(dimension.domain) for dimension in space.dimensions}


def _distribution(domain: Domain) -> BaseDistribution:
    if isinstance(domain, Choice):
        return CategoricalDistribution(domain.values)
    if isinstance(domain, Whole):
        return IntDistribution(domain.low, domain.high, log=domain.log, step=domain.step)
    return FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)


def derived_seed(seed: int, number: int, attempt: int = 0) -> int:
    """Seed of a draw, from the search's seed, the trial's number, and how often it was drawn before.

    A sampler that is made again starts its random numbers again, so one seed for all would repeat draws
    after a restart; this one depends on the study alone, however often the process was killed.
    """
    words = (seed, number, attempt) if attempt else (seed, number)
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def make_sampler(
    settings: SearchSettings,
    space: Space,
    number: int,
    prior: Sequence[FrozenTrial] = (),
    *,
    tried: frozenset[Point] = frozenset(),
    given: Values | None = None,
) -> BaseSampler:
    """The sampler for one draw.

    Args:
        settings: of the search.
        space: what is searched.
        number: of the trial.
        prior: trials of an earlier study, for CMA-ES, which begins where they were best (Nomura et al., AAAI
            2021, warm-starting CMA-ES) and does not learn from trials that it did not draw.
        tried: points not to be drawn.
        given: values of the trial that were written already.

    Raises:
        SearchError: the sampler cannot do the space, or does not know an option.
    """
    check_sampler(settings, space)
    return Untried(
        lambda attempt: _sampler(settings, space, number, prior, attempt),
        space,
        distributions(space),
        tried,
        given or {},
        derived_seed(settings.seed, number, REDRAWS + 1),
    )


def _sampler(
    settings: SearchSettings, space: Space, number: int, prior: Sequence[FrozenTrial], attempt: int
) -> BaseSampler:
    chance = derived_seed(settings.seed, number, attempt)
    factory = _FACTORIES[settings.sampler]
    options: dict[str, Any] = {"seed": settings.seed if settings.sampler in ONE_SEQUENCE else chance}
    options |= dict(settings.sampler_options)
    if prior and settings.sampler == "cmaes":
        options["source_trials"] = list(prior)
    if settings.sampler in ONE_SEQUENCE:
        # Draws until a trial has succeeded, and what an enqueued point of a grid leaves open: with the
        # sequence's seed they would all be the same point.
        options = {"independent_sampler": optuna.samplers.RandomSampler(chance)} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            return factory(space, options)
        except (TypeError, ValueError) as error:
            raise SearchError(
                f"search.sampler_options={dict(settings.sampler_options)!r}",
                f"Optuna's {settings.sampler} sampler does not take them: {error}",
            ) from error


def drawn_beside(
    sampler: BaseSampler,
    directions: Sequence[StudyDirection],
    known: Sequence[FrozenTrial],
    item: FrozenTrial,
    space: Distributions,
) -> FrozenTrial:
    """A trial as a sampler draws it in a study of its own.

    Args:
        sampler: draws all values of the trial in one go.
        directions: of the objectives.
        known: trials that the sampler may learn from.
        item: the trial that the values are for; those that it was enqueued with stand.
        space: what is searched.
    """
    fixed = item.system_attrs.get("fixed_params")
    beside = optuna.create_study(directions=directions, sampler=sampler)
    beside.add_trials(known)
    if fixed is not None:
        beside.enqueue_trial(fixed)
    beside.ask(space)
    return beside.get_trials(deepcopy=False)[-1]


def _tpe(_: Space, options: Mapping[str, Any]) -> BaseSampler:
    return optuna.samplers.TPESampler(**options)


def _random(_: Space, options: Mapping[str, Any]) -> BaseSampler:
    return optuna.samplers.RandomSampler(**options)


def _grid(space: Space, options: Mapping[str, Any]) -> BaseSampler:
    return _Grid(space, **options)


class _Grid(optuna.samplers.GridSampler):
    """Optuna's grid, that completes points that were begun, too, and leaves it to the caller to stop: at the
    last point it would call ``Study.stop``, which raises outside of ``Study.optimize``."""

    def __init__(self, space: Space, independent_sampler: BaseSampler, **options: Any) -> None:
        super().__init__(grid(space), **options)
        self._chance = independent_sampler

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Of the trial's point, or by chance where an enqueued one leaves the key open."""
        if "fixed_params" in trial.system_attrs:
            return self._chance.sample_independent(study, trial, param_name, param_distribution)
        return super().sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing: ``StudyTrials.total`` ends the search."""


def _cmaes(_: Space, options: Mapping[str, Any]) -> BaseSampler:
    return optuna.samplers.CmaEsSampler(**options)


def _qmc(_: Space, options: Mapping[str, Any]) -> BaseSampler:
    return optuna.samplers.QMCSampler(**{"warn_asynchronous_seeding": False} | dict(options))


def _gp(_: Space, options: Mapping[str, Any]) -> BaseSampler:
    return optuna.samplers.GPSampler(**options)


def _nsgaii(_: Space, options: Mapping[str, Any]) -> BaseSampler:
    return optuna.samplers.NSGAIISampler(**options)


_FACTORIES: Mapping[str, Callable[[Space, Mapping[str, Any]], BaseSampler]] = {
    "tpe": _tpe,
    "random": _random,
    "grid": _grid,
    "cmaes": _cmaes,
    "qmc": _qmc,
    "gp": _gp,
    "nsgaii": _nsgaii,
}


@contextmanager
def one_torch_thread(sampler: str) -> Iterator[None]:
    """One thread for the Gaussian process, which is many times slower with more; nothing for the others."""
    if sampler != "gp":
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

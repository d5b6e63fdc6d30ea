"""Draws that repeat no trial: training is deterministic, so a point that was tried tells nothing new."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.core.space import Point, Space, Values

REDRAWS = 5  # times that a sampler is asked again for another point before one is chosen without it


def tried_points(trials: Iterable[FrozenTrial], space: Space) -> frozenset[Point]:
    """The points of trials, whatever became of them: what failed would fail again. Those that are enqueued
    count too."""
    values = (item.system_attrs.get("fixed_params", {}) | item.params for item in trials)
    return frozenset(point for each in values if (point := space.point(each)) is not None)


def points_left(trials: Sequence[FrozenTrial], space: Space) -> int | None:
    """How many points no trial has; None where points cannot be counted."""
    return None if space.size is None else space.size - len(tried_points(trials, space))


class Untried(BaseSampler):
    """Draws as another sampler does, again where a trial has that point, and at last by chance what is left.

    Where nothing is left (values of an enqueued trial stand, whatever they are), its first draw stays.

    Args:
        make: the sampler, by how often it was asked for this trial before, which changes its random numbers.
        space: what is searched.
        distributions: the same, as Optuna knows it.
        tried: points not to be drawn.
        given: values of the trial that were written already.
        seed: of what is drawn without the sampler.
    """

    def __init__(
        self,
        make: Callable[[int], BaseSampler],
        space: Space,
        distributions: dict[str, BaseDistribution],
        tried: frozenset[Point],
        given: Values,
        seed: int,
    ) -> None:
        self._make = make
        self._sampler = make(0)
        self._space = space
        self._distributions = distributions
        self._tried = tried
        self._given = given
        self._seed = seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All keys that are not enqueued with the trial: a point is judged as a whole."""
        del study
        fixed = trial.system_attrs.get("fixed_params", {})
        return {
            key: distribution
            for key, distribution in self._distributions.items()
            if key not in fixed and not distribution.single()
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A point that was not tried."""
        fixed = {
            dimension.name: dimension.domain.at(0)
            for dimension in self._space.dimensions
            if dimension.domain.count == 1
        }
        fixed |= trial.system_attrs.get("fixed_params", {}) | dict(self._given)
        first = drawn = self._draw(self._sampler, study, trial, search_space)
        for attempt in range(1, REDRAWS + 1):
            if self._space.point(drawn | fixed) not in self._tried:
                return drawn
            drawn = self._draw(self._make(attempt), study, trial, search_space)
        if self._space.point(drawn | fixed) not in self._tried:
            return drawn
        return first | self._by_chance(study, trial, fixed)

    def _draw(
        self,
        sampler: BaseSampler,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """As Optuna asks a sampler: for what it draws together, then for the rest one by one."""
        together = sampler.infer_relative_search_space(study, trial)
        drawn = sampler.sample_relative(study, trial, together)
        now = study._storage.get_trial(trial._trial_id)  # with what the sampler noted of it
        return {
            key: drawn[key] if key in drawn else sampler.sample_independent(study, now, key, distribution)
            for key, distribution in search_space.items()
        }

    def _by_chance(self, study: Study, trial: FrozenTrial, fixed: Values) -> dict[str, Any]:
        """One of the points that are left, each as likely as another; nothing where none is."""
        free = [(at, each) for at, each in enumerate(self._space.dimensions) if each.name not in fixed]
        counts = [each.domain.count for _, each in free]
        if None in counts:
            chance = optuna.samplers.RandomSampler(self._seed)
            return {
                each.name: chance.sample_independent(study, trial, each.name, self._distributions[each.name])
                for _, each in free
            }
        whole = [count for count in counts if count is not None]
        taken = sorted(self._numbers([at for at, _ in free], whole, fixed))
        if len(taken) == math.prod(whole):
            return {}
        number = random.Random(self._seed).randrange(math.prod(whole) - len(taken))
        for other in taken:
            number += other <= number
        values = {}
        for (_, each), count in reversed(list(zip(free, whole, strict=True))):
            number, place = divmod(number, count)
            values[each.name] = each.domain.at(place)
        return values

    def _numbers(self, free: Sequence[int], counts: Sequence[int], fixed: Values) -> set[int]:
        """The tried points with these fixed values, as numbers of mixed radix."""
        stands = {
            at: each.domain.place(fixed[each.name])
            for at, each in enumerate(self._space.dimensions)
            if each.name in fixed
        }
        found = set()
        for point in self._tried:
            if all(point[at] == place for at, place in stands.items()):
                number = 0
                for at, count in zip(free, counts, strict=True):
                    number = number * count + int(point[at])
                found.add(number)
        return found

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """As the sampler."""
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """As the sampler."""
        self._sampler.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """As the sampler."""
        self._sampler.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """As the sampler."""
        self._sampler.reseed_rng()

"""Suggests the values of a trial, with Optuna's sampler seeded so that a resumed search suggests the same,
and called again if another trial has the same combination."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from plait.core.errors import SearchError
from plait.core.settings import SearchSettings
from plait.core.space import Choice, Dimension, Domain, Point, Real, Space, Value, Values, Whole, as_written
from plait.search.points import outside_of, tried_points
from plait.search.samplers import SAMPLERS

SPACE = "plait.space"  # study: what is searched, by key
ATTEMPTS = 6  # calls of the sampler for an untried combination before one is chosen without it
LISTED = 100_000  # untried combinations are listed only in spaces of at most this size

Distributions = dict[str, BaseDistribution]


def distributions(space: Space) -> Distributions:
    """The space in Optuna's form."""
    return {dimension.name: _distribution(dimension.domain) for dimension in space.dimensions}


def _distribution(domain: Domain) -> BaseDistribution:
    if isinstance(domain, Choice):
        return CategoricalDistribution(domain.values)
    if isinstance(domain, Whole):
        return IntDistribution(domain.low, domain.high, log=domain.log, step=domain.step)
    return FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)


def keep_space(study: Study, space: Space) -> None:
    """Store with a study what it searches, for readers that do not have its command."""
    if SPACE not in study.user_attrs:
        texts = {key: distribution_to_json(found) for key, found in distributions(space).items()}
        study.set_user_attr(SPACE, texts)


def read_space(study: Study) -> Space:
    """The space that a study searches.

    Raises:
        SearchError: the study does not contain it.
    """
    texts = study.user_attrs.get(SPACE)
    if texts is None:
        raise SearchError(
            f"search.name={study.study_name}",
            "The study does not contain its search space.",
            f"Run `plait resume {study.study_name}`, which stores it.",
        )
    found = {key: json_to_distribution(text) for key, text in texts.items()}
    return Space(tuple(Dimension(key, _domain(distribution)) for key, distribution in found.items()))


def _domain(distribution: BaseDistribution) -> Domain:
    if isinstance(distribution, CategoricalDistribution):
        return Choice(distribution.choices, tuple(map(as_written, distribution.choices)))
    if isinstance(distribution, IntDistribution):
        return Whole(distribution.low, distribution.high, distribution.step, distribution.log)
    assert isinstance(distribution, FloatDistribution)
    return Real(distribution.low, distribution.high, distribution.step, distribution.log)


def derived_seed(seed: int, number: int, attempt: int = 0) -> int:
    """The seed of a suggestion, from the search's seed, the trial's number, and the number of earlier
    attempts.

    A new sampler restarts its random numbers, so one seed for all trials would repeat suggestions after a
    restart; this seed depends only on the study, however often the process was killed.
    """
    words = (seed, number, attempt) if attempt else (seed, number)
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def make_sampler(
    settings: SearchSettings,
    space: Space,
    number: int,
    earlier: Sequence[FrozenTrial] = (),
    *,
    tried: frozenset[Point] = frozenset(),
    given: Values | None = None,
) -> BaseSampler:
    """The sampler for one trial.

    Args:
        earlier: trials of an earlier study, for a sampler that takes them as an argument.
        tried: points not to be suggested.
        given: values of the trial that are already written.

    Raises:
        SearchError: the sampler does not accept an option.
    """

    def make(attempt: int) -> BaseSampler:
        return _sampler(settings, number, earlier, attempt)

    return Untried(make, space, tried, given or {}, derived_seed(settings.seed, number, ATTEMPTS))


def _sampler(
    settings: SearchSettings, number: int, earlier: Sequence[FrozenTrial], attempt: int
) -> BaseSampler:
    chance = derived_seed(settings.seed, number, attempt)
    registered = SAMPLERS.get(settings.sampler)
    options: dict[str, Any] = {"seed": settings.seed if registered.one_sequence else chance}
    if earlier and registered.source_trials:
        options["source_trials"] = list(earlier)
    if registered.one_sequence:
        # For suggestions until a trial has succeeded; with the sequence's seed they would all be equal.
        options["independent_sampler"] = optuna.samplers.RandomSampler(chance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            return registered.make(**options | dict(settings.sampler_options))
        except (TypeError, ValueError) as error:
            raise _not_taken(settings, error) from error


def check_options(settings: SearchSettings, space: Space) -> None:
    """Check that the sampler accepts the given options and suggests a first trial with them.

    Raises:
        SearchError: it does not.
    """
    if not settings.sampler_options:
        return
    directions = [StudyDirection[each.direction.upper()] for each in settings.objectives]
    study = optuna.create_study(directions=directions, sampler=make_sampler(settings, space, 0))
    try:
        with one_torch_thread(settings.sampler):
            study.ask(distributions(space))
    except (TypeError, ValueError) as error:
        raise _not_taken(settings, error) from error


def _not_taken(settings: SearchSettings, error: Exception) -> SearchError:
    return SearchError(
        f"search.sampler_options={dict(settings.sampler_options)!r}",
        f"The {settings.sampler} sampler does not take them: {error}",
        "Correct them, or leave them out.",
    )


class Untried(BaseSampler):
    """Calls the sampler again if another trial has the same combination, and finally chooses an untried one.

    Training is deterministic, so the same combination would give the same adapter. If no untried one is left
    because an enqueued trial fixes some values, the first suggestion is used.

    Args:
        make: makes the sampler, given the number of earlier attempts, which changes its random numbers.
        tried: points not to be suggested.
        given: values of the trial that are already written.
        seed: seed of the choice without the sampler.
    """

    def __init__(
        self,
        make: Callable[[int], BaseSampler],
        space: Space,
        tried: frozenset[Point],
        given: Values,
        seed: int,
    ) -> None:
        self._make = make
        self._sampler = make(0)
        self._space = space
        self._distributions = distributions(space)
        self._tried = tried
        self._given = given
        self._seed = seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        """All keys that are not enqueued with the trial, because only a whole point can be new or not."""
        del study
        fixed = trial.system_attrs.get("fixed_params", {})
        return {
            key: distribution
            for key, distribution in self._distributions.items()
            if key not in fixed and not distribution.single()
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        """An untried point."""
        if not search_space:
            return {}  # every value is given
        fixed = {
            dimension.name: dimension.domain.at(0)
            for dimension in self._space.dimensions
            if dimension.domain.count == 1
        }
        fixed |= trial.system_attrs.get("fixed_params", {}) | dict(self._given)
        first: dict[str, Any] = {}
        for attempt in range(ATTEMPTS):
            sampler = self._make(attempt) if attempt else self._sampler
            suggested = self._ask(sampler, study, trial, search_space)
            if self._space.point(suggested | fixed) not in self._tried:
                return suggested
            first = first or suggested
        return first | self._choose(fixed)

    def _ask(
        self, sampler: BaseSampler, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        """Call a sampler as Optuna does: for the values that it suggests together, then for the others one by
        one."""
        together = sampler.infer_relative_search_space(study, trial)
        values = sampler.sample_relative(study, trial, together)
        now = study._storage.get_trial(trial._trial_id)  # with the attributes that the sampler stored
        return {
            key: values[key] if key in values else sampler.sample_independent(study, now, key, distribution)
            for key, distribution in search_space.items()
        }

    def _choose(self, fixed: Values) -> dict[str, Value]:
        """One of the untried combinations with these values, all equally likely; {} if none is left, or they
        cannot be counted."""
        if self._space.size is None:
            return {}
        free = [each for each in self._space.dimensions if each.name not in fixed]
        counts = [each.domain.count or 1 for each in free]
        chance = random.Random(self._seed)

        def untried(places: Sequence[int]) -> dict[str, Value] | None:
            values = {each.name: each.domain.at(at) for each, at in zip(free, places, strict=True)}
            return None if self._space.point(values | dict(fixed)) in self._tried else values

        if math.prod(counts) <= LISTED:
            left = [found for each in itertools.product(*map(range, counts)) if (found := untried(each))]
            return chance.choice(left) if left else {}
        attempts = ([chance.randrange(count) for count in counts] for _ in range(LISTED))
        return next((found for each in attempts if (found := untried(each))), {})

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


class Suggester:
    """Suggests the values of a study's trials, under the study's lock.

    Args:
        earlier: trials of an earlier study that the sampler learns from.
    """

    def __init__(
        self, study: Study, settings: SearchSettings, space: Space, earlier: Sequence[FrozenTrial] = ()
    ) -> None:
        self._study = study
        self._settings = settings
        self._space = space
        self._distributions = distributions(space)
        self._earlier = earlier

    def begin(self, trials: Sequence[FrozenTrial], number: int) -> int:
        """Begin the queued trial that Optuna takes next, or a new one, which will have the number ``number``.

        Its values are suggested by :meth:`complete`, in a separate study, if the sampler learns from an
        earlier study or must not learn from all trials of this one.
        """
        if self._earlier or any(map(outside_of, trials)):
            self._study.sampler = optuna.samplers.RandomSampler()
            return self._study.ask().number
        tried = tried_points(trials, self._space)
        self._study.sampler = make_sampler(self._settings, self._space, number, tried=tried)
        with one_torch_thread(self._settings.sampler):
            return self._study.ask(self._distributions).number

    def complete(self, trials: Sequence[FrozenTrial]) -> bool:
        """Suggest the missing values of RUNNING trials; return whether any were missing.

        A trial lacks values if its process was killed before they were written, if it precedes other queued
        trials, or if they are suggested in a separate study. Keys with settings outside the search space get
        no other values.
        """
        names = self._distributions.keys()
        running = (item for item in trials if item.state == TrialState.RUNNING)
        cut = [item for item in running if names - outside_of(item).keys() - item.params.keys()]
        for item in cut:
            self._complete(item)
        return bool(cut)

    def _complete(self, item: FrozenTrial) -> None:
        """Suggest in a separate study with the earlier trials and those before this one, because a sampler
        suggests all values of a trial at once. No point of another trial is suggested, not even of a later
        one. Trials with settings outside the search space are left out, because they say nothing about its
        values."""
        storage, outside = self._study._storage, outside_of(item)
        keys = {key: each for key, each in self._distributions.items() if key not in outside}
        space = Space(tuple(each for each in self._space.dimensions if each.name in keys))
        trials = self._study.get_trials(deepcopy=False)
        before = [
            other
            for other in trials[: item.number]
            if other.state != TrialState.WAITING and not outside_of(other)
        ]
        known = [*self._earlier, *before]
        others = [] if outside else [other for other in trials if other.number != item.number]
        tried = tried_points(others, self._space)
        sampler = make_sampler(
            self._settings, space, item.number, self._earlier, tried=tried, given=item.params
        )
        separate = optuna.create_study(directions=self._study.directions, sampler=sampler)
        separate.add_trials(known)
        if (fixed := item.system_attrs.get("fixed_params")) is not None:
            separate.enqueue_trial(fixed)
        numbered = SAMPLERS.get(self._settings.sampler).one_sequence  # in attributes of the study
        if numbered:
            _copy_attributes(self._study, separate)
        with one_torch_thread(self._settings.sampler):
            separate.ask(keys)
        if numbered:
            _copy_attributes(separate, self._study)
        found = separate.get_trials(deepcopy=False)[-1]
        for key, value in found.system_attrs.items():
            if key not in item.system_attrs:
                storage.set_trial_system_attr(item._trial_id, key, value)
        for key, distribution in keys.items():
            if key not in item.params:
                value = distribution.to_internal_repr(found.params[key])
                storage.set_trial_param(item._trial_id, key, value, distribution)


def _copy_attributes(source: Study, target: Study) -> None:
    """Copy what samplers store with a study."""
    for key, value in source._storage.get_study_system_attrs(source._study_id).items():
        target._storage.set_study_system_attr(target._study_id, key, value)


@contextmanager
def one_torch_thread(sampler: str) -> Iterator[None]:
    """Limit torch to one thread for a sampler that is many times slower with more."""
    if not SAMPLERS.get(sampler).one_thread:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

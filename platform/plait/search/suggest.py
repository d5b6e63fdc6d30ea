"""Suggests the values of a trial, with Optuna's sampler seeded so that a resumed search suggests the same,
and called again if another trial has the same combination.

A trial begins without values; they are suggested afterwards, so that one whose process was killed in between
is completed in the same way.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import warnings
from collections.abc import Iterator, Sequence
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
from plait.search.storage import quiet

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
    settings: SearchSettings, number: int, earlier: Sequence[FrozenTrial] = (), attempt: int = 0
) -> BaseSampler:
    """The sampler for one trial.

    Args:
        earlier: trials of an earlier study, for a sampler that takes them as an argument.
        attempt: how often a sampler was asked for this trial before.

    Raises:
        SearchError: the sampler does not accept an option.
    """
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
    quiet()
    directions = [StudyDirection[each.direction.upper()] for each in settings.objectives]
    study = optuna.create_study(directions=directions)
    suggester = Suggester(study, settings, space)
    suggester.begin()
    try:
        suggester.complete(study.get_trials(deepcopy=False))
    except (TypeError, ValueError) as error:
        raise _not_taken(settings, error) from error


def _not_taken(settings: SearchSettings, error: Exception) -> SearchError:
    return SearchError(
        f"search.sampler_options={dict(settings.sampler_options)!r}",
        f"The {settings.sampler} sampler does not take them: {error}",
        "Correct them, or leave them out.",
    )


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

    def begin(self) -> int:
        """Begin the queued trial that Optuna takes next, or a new one, and return its number; its values are
        suggested by :meth:`complete`."""
        self._study.sampler = optuna.samplers.RandomSampler()  # is asked for nothing
        return self._study.ask().number

    def complete(self, trials: Sequence[FrozenTrial]) -> bool:
        """Suggest the missing values of RUNNING trials, which have just begun, or whose process was killed
        before all were written; return whether any were missing. Keys with settings outside the search space
        get no other values."""
        names = self._distributions.keys()
        running = (item for item in trials if item.state == TrialState.RUNNING)
        cut = [item for item in running if names - outside_of(item).keys() - item.params.keys()]
        for item in cut:
            self._complete(item)
        return bool(cut)

    def _complete(self, item: FrozenTrial) -> None:
        trials, outside = self._study.get_trials(deepcopy=False), outside_of(item)
        dimensions = tuple(each for each in self._space.dimensions if each.name not in outside)
        others = [] if outside else [other for other in trials if other.number != item.number]
        enqueued = item.system_attrs.get("fixed_params", {})
        point = _OpenPoint(Space(dimensions), enqueued, item.params, tried_points(others, self._space))
        if self._earlier or any(map(outside_of, trials)):
            values = self._suggest_apart(item, trials, point)
        else:
            values = self._suggest(self._study, item, item.number, point)
        for dimension in dimensions:
            if (key := dimension.name) not in item.params:
                distribution = self._distributions[key]
                value = distribution.to_internal_repr(values[key])
                self._study._storage.set_trial_param(item._trial_id, key, value, distribution)

    def _suggest(self, study: Study, item: FrozenTrial, number: int, point: _OpenPoint) -> Values:
        """The values of trial ``number``, which is ``item`` in ``study``.

        The sampler is called again if another trial has the same combination, since training is
        deterministic and would give the same adapter; finally an untried one is chosen. If none is left,
        because an enqueued trial fixes some values, the first suggestion is used.
        """
        keys = {key: self._distributions[key] for key in point.asked}
        first: dict[str, Any] = {}
        for attempt in range(ATTEMPTS if keys else 0):
            study.sampler = make_sampler(self._settings, number, self._earlier, attempt)
            with one_torch_thread(self._settings.sampler):
                suggested = _ask(study, item, keys)
            if not point.is_tried(suggested):
                return suggested | point.known
            first = first or suggested
        chance = random.Random(derived_seed(self._settings.seed, number, ATTEMPTS))
        return first | point.untried(chance) | point.known

    def _suggest_apart(self, item: FrozenTrial, trials: Sequence[FrozenTrial], point: _OpenPoint) -> Values:
        """The same in a separate study, with the earlier trials and those before this one, but none that has
        settings outside the search space, because these say nothing about its values."""
        before = [
            other
            for other in trials[: item.number]
            if other.state != TrialState.WAITING and not outside_of(other)
        ]
        separate = optuna.create_study(directions=self._study.directions)
        separate.add_trials([*self._earlier, *before])
        numbered = SAMPLERS.get(self._settings.sampler).one_sequence  # in attributes of the study
        if numbered:
            _copy_attributes(self._study, separate)
        separate.ask()
        values = self._suggest(separate, separate.get_trials(deepcopy=False)[-1], item.number, point)
        if numbered:
            _copy_attributes(separate, self._study)
        for key, value in separate.get_trials(deepcopy=False)[-1].system_attrs.items():
            if key not in item.system_attrs:
                self._study._storage.set_trial_system_attr(item._trial_id, key, value)
        return values


class _OpenPoint:
    """A point of which some values are known.

    Args:
        enqueued: values that the user gave.
        written: values that were suggested before the trial's process was killed.
        tried: points not to be suggested.

    Attributes:
        known: all these, and those of keys with one value only.
        asked: names of the keys that the sampler is asked for: those that are written, too, so that the
            others come out as they did.
    """

    def __init__(self, space: Space, enqueued: Values, written: Values, tried: frozenset[Point]) -> None:
        self._space = space
        self._tried = tried
        given = {each.name: each.domain.at(0) for each in space.dimensions if each.domain.count == 1}
        given |= enqueued
        self.asked = [each.name for each in space.dimensions if each.name not in given]
        self.known = given | dict(written)
        self._open = [each for each in space.dimensions if each.name not in self.known]

    def is_tried(self, values: Values) -> bool:
        """Whether another trial has these values, and the known ones."""
        return self._space.point(dict(values) | self.known) in self._tried

    def untried(self, chance: random.Random) -> dict[str, Value]:
        """One of the untried combinations, all equally likely; {} if none is left, or they cannot be
        counted."""
        if self._space.size is None:
            return {}
        counts = [each.domain.count or 1 for each in self._open]

        def found(places: Sequence[int]) -> dict[str, Value] | None:
            values = {each.name: each.domain.at(at) for each, at in zip(self._open, places, strict=True)}
            return None if self.is_tried(values) else values

        if math.prod(counts) <= LISTED:
            left = [values for each in itertools.product(*map(range, counts)) if (values := found(each))]
            return chance.choice(left) if left else {}
        attempts = ([chance.randrange(count) for count in counts] for _ in range(LISTED))
        return next((values for each in attempts if (values := found(each))), {})


def _ask(study: Study, item: FrozenTrial, keys: Distributions) -> dict[str, Any]:
    """Call a study's sampler as Optuna does: for the values that it suggests together, then for the others
    one by one."""
    sampler = study.sampler
    sampler.before_trial(study, item)
    together = sampler.infer_relative_search_space(study, item)
    values = sampler.sample_relative(study, item, together)
    now = study._storage.get_trial(item._trial_id)  # with the attributes that the sampler stored
    return {
        key: values[key] if key in values else sampler.sample_independent(study, now, key, distribution)
        for key, distribution in keys.items()
    }


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

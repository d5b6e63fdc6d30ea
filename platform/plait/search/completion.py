"""The values of a trial that were not written yet: its process was killed as it drew them, or it comes before
others that wait."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.core.settings import SearchSettings
from plait.core.space import Space
from plait.search.prior import Known
from plait.search.samplers import distributions, drawn_beside, make_sampler, one_torch_thread
from plait.search.untried import tried_points


def complete(
    study: Study,
    storage: BaseStorage,
    item: FrozenTrial,
    settings: SearchSettings,
    space: Space,
    prior: Sequence[Known],
) -> None:
    """Draw what a trial lacks, beside the study with the prior and what was there before the trial, since a
    sampler draws all values of a trial in one go. No other trial's point is drawn, of later ones neither."""
    keys = distributions(space)
    trials = study.get_trials(deepcopy=False)
    before = [other for other in trials[: item.number] if other.state != TrialState.WAITING]
    known = [*(each.frozen(keys) for each in prior), *before]
    tried = tried_points([other for other in trials if other.number != item.number], space)
    sampler = make_sampler(settings, space, item.number, known[: len(prior)], tried=tried, given=item.params)
    with one_torch_thread(settings.sampler):
        drawn = drawn_beside(sampler, study.directions, known, item, keys)
    for key, value in drawn.system_attrs.items():
        if key not in item.system_attrs:
            storage.set_trial_system_attr(item._trial_id, key, value)
    for key, distribution in keys.items():
        if key not in item.params:
            value = distribution.to_internal_repr(drawn.params[key])
            storage.set_trial_param(item._trial_id, key, value, distribution)

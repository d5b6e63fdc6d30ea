"""The values of a trial that were not written yet: its process was killed as it drew them, or it comes before
others that wait."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from plait.search.prior import Known
from plait.search.samplers import distributions, drawn_beside, make_sampler, one_torch_thread
from plait.search.space import Space
from plait.settings import SearchSettings


def complete(
    study: Study,
    storage: BaseStorage,
    item: FrozenTrial,
    settings: SearchSettings,
    space: Space,
    prior: Sequence[Known],
) -> None:
    """Draw what a trial lacks, beside the study with the prior and what was there before the trial, since a
    sampler draws all values of a trial in one go."""
    keys = distributions(space)
    earlier = study.get_trials(deepcopy=False)[: item.number]
    before = [other for other in earlier if other.state != TrialState.WAITING]
    known = [*(each.frozen(keys) for each in prior), *before]
    sampler = make_sampler(settings, space, item.number, known[: len(prior)])
    with one_torch_thread(settings.sampler):
        drawn = drawn_beside(sampler, study.directions, known, item, keys)
    for key, value in drawn.system_attrs.items():
        if key not in item.system_attrs:
            storage.set_trial_system_attr(item._trial_id, key, value)
    for key, distribution in keys.items():
        if key not in item.params:
            value = distribution.to_internal_repr(drawn.params[key])
            storage.set_trial_param(item._trial_id, key, value, distribution)

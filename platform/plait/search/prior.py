"""What the sampler learns from an earlier study: its finished trials (search.prior)."""

from __future__ import annotations

import json
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from plait.core.errors import SearchError, choices
from plait.core.settings import SearchSettings
from plait.core.space import Space
from plait.search.attributes import PROBLEM
from plait.search.identity import comparison, difference
from plait.search.points import outside_of, read_values
from plait.search.samplers import SAMPLERS
from plait.search.suggest import distributions
from plait.utils.counts import counted

PRIOR = "plait.prior"  # study: name of the earlier study and its trials, as JSON

STARTUP = "n_startup_trials"  # option of tpe and gp: until there are this many trials, they suggest at random
STARTUP_TRIALS = 10  # Optuna's default of it

COMPARED_BY = ("search.metric", "search.direction", "search.constraints")  # keys of ``comparison``


def check_prior(name: str, settings: SearchSettings, space: Space, storage: BaseStorage | None) -> None:
    """Check that the earlier study, if one is given, suits the search called ``name``, unless that has stored
    its trials; errors as for :func:`earlier_trials`."""
    if settings.prior is not None:
        _known(name, settings, space, storage)


def _known(
    name: str, settings: SearchSettings, space: Space, storage: BaseStorage | None
) -> list[dict[str, Any]]:
    """The trials that the search called ``name`` has stored; if none, as :func:`_read`."""
    if storage is not None and not settings.fresh and name in optuna.get_all_study_names(storage):
        kept = _kept(optuna.load_study(study_name=name, storage=storage))
        if kept.get("name") == settings.prior:
            trials: list[dict[str, Any]] = kept["trials"]
            return trials
    return _read(name, settings, space, storage)


def earlier_trials(
    study: Study, settings: SearchSettings, space: Space, storage: BaseStorage | None
) -> list[FrozenTrial]:
    """The trials of the earlier study in this search's space; none if none is given. The first call stores
    them with this study, so that all suggestions of a search use the same ones even if the earlier study
    changes.

    Args:
        storage: has the earlier study or, if this study is a copy, the search with what it has stored.

    Raises:
        SearchError: the study is missing, or its trials have no meaning in this search.
    """
    if settings.prior is None:
        return []
    kept = _kept(study)
    if kept.get("name") != settings.prior:
        kept = {"name": settings.prior, "trials": _known(study.study_name, settings, space, storage)}
        study.set_user_attr(PRIOR, json.dumps(kept))
    here = distributions(space)
    return [create_trial(distributions=here, **facts) for facts in kept["trials"]]


def _kept(study: Study) -> dict[str, Any]:
    """The name and the trials of the earlier study that a study has stored; empty if none."""
    kept: dict[str, Any] = json.loads(study.user_attrs.get(PRIOR, "{}"))
    return kept


def describe_prior(settings: SearchSettings, known: int) -> str:
    """Describe to the user how the sampler uses ``known`` trials of an earlier study."""
    line = f"search.prior={settings.prior}: the sampler learns from its {counted(known, 'finished trial')}"
    needed = int(settings.sampler_options.get(STARTUP, STARTUP_TRIALS))
    if SAMPLERS.get(settings.sampler).source_trials or known >= needed:
        return line
    return (
        f"{line}; {settings.sampler} suggests at random until it has seen {counted(needed, 'trial')}, "
        f"including those of this search (++search.sampler_options.{STARTUP}={known} learns from these at "
        "once)"
    )


def _read(
    name: str, settings: SearchSettings, space: Space, storage: BaseStorage | None
) -> list[dict[str, Any]]:
    """Points, objectives and constraints of the earlier study's complete trials in the space of the search
    that will be called ``name``; errors as for :func:`earlier_trials`."""
    problem, study = _find(name, settings, storage)
    was = {key: text for key, text in problem.items() if key.startswith("space.")}
    keys = {f"space.{key}" for key in space.describe()}
    lines = [f"{key}: searched {'there' if key in was else 'here'} only" for key in sorted(was.keys() ^ keys)]
    compared = {key: value for key, value in problem.items() if key in COMPARED_BY}
    lines += difference(compared, comparison(settings))
    if lines:
        raise SearchError(
            f"search.prior={settings.prior}",
            "The sampler can learn from a study that searched the same keys with the same objective:\n"
            + "\n".join(lines),
            "Use the same keys and objective (ranges may differ), or leave out search.prior.",
        )
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    found = [facts for item in complete if (facts := _facts(item, space)) is not None]
    if not found:
        raise SearchError(
            f"search.prior={settings.prior}",
            f"None of its {len(complete)} complete trials lies in this search space.",
            "Use a search space that contains some of them, or leave out search.prior.",
        )
    return found


def _find(
    name: str, settings: SearchSettings, storage: BaseStorage | None
) -> tuple[dict[str, object], Study]:
    there = [] if storage is None else sorted(optuna.get_all_study_names(storage))
    others = [each for each in there if each != name]
    if storage is None or settings.prior not in others:
        raise SearchError(
            f"search.prior={settings.prior}",
            "search.prior must name another study in the same storage (search.storage).",
            f"Available: {choices(others)}." if others else "There is no other study.",
        )
    study = optuna.load_study(study_name=settings.prior, storage=storage)
    if (stored := study.user_attrs.get(PROBLEM)) is None:
        raise SearchError(
            f"search.prior={settings.prior}",
            "This study was not created by Plait.",
            "Leave out search.prior.",
        )
    return json.loads(stored), study


def _facts(item: FrozenTrial, space: Space) -> dict[str, Any] | None:
    """A trial of the earlier study; None if a value is outside either search space, or was not written."""
    try:
        point = {} if outside_of(item) else read_values(space, item.params)
    except SearchError:
        return None
    if point.keys() != space.describe().keys():
        return None
    return {"params": point, "values": item.values, "constraints": dict(item.constraints)}

"""Decides whether two searches are the same: a pure function of the space and the settings.

Some settings do not count, because they change where and how fast a search runs but not its result:
``tracking``, ``engine``, ``planner``, ``cluster``, and of ``search`` its name, how many trials and how many
at once (more trials resume the same search), ``enqueue``, storage, ``fresh`` and ``max_failure_rate``.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection

from plait.core.errors import SearchError
from plait.core.jobs import JobSpec
from plait.core.objectives import Objective
from plait.core.settings import RunSettings, SearchSettings
from plait.core.space import Space
from plait.search.attributes import MATERIAL, PROBLEM, TOKEN

ROWS = "rows of "  # before a key of the material: its data in words, which are not compared
RESTORE = (
    "Restore what it was started with, choose another search.name, or start again with search.fresh=true."
)
MOST_LINES = 3  # differences that an error lists


@dataclass(frozen=True, slots=True)
class Identity:
    """``problem``: what is searched; ``manner``: how points are suggested. Both are flat and JSON.

    A study belongs to one problem, but may resume in another manner. The default name is a digest of both.
    """

    problem: Mapping[str, Any]
    manner: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The default ``search.name``."""
        text = json.dumps([dict(self.problem), dict(self.manner)], sort_keys=True)
        return f"search-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def problem_json(self) -> str:
        """``problem`` as text, to be kept in the study."""
        return json.dumps(dict(self.problem), sort_keys=True)


def identify(space: Space, base: JobSpec, settings: RunSettings) -> Identity:
    """The identity of a search.

    Args:
        base: the job with the settings that are not searched; searched keys are ignored.
    """
    swept = space.describe()
    fixed = {key: value for key, value in base.parameters().items() if not _covered(key, swept)}
    search = settings.search
    problem = (
        {f"space.{key}": text for key, text in swept.items()}
        | {key: _plain(value) for key, value in fixed.items()}
        | {f"model.{key}": value for key, value in asdict(settings.model).items()}
        | comparison(search)
    )
    manner: dict[str, Any] = {
        "search.sampler": search.sampler,
        "search.sampler_options": dict(search.sampler_options),
        "search.seed": search.seed,
    }
    if search.prior is not None:
        manner["search.prior"] = search.prior
    if search.stopping.active:
        manner["search.stopping"] = asdict(search.stopping)
    return Identity(problem, manner)


def comparison(search: SearchSettings) -> dict[str, Any]:
    """The settings by which trials are rated; two searches must share them for one to learn from the
    other."""
    several = len(search.objectives) > 1
    metrics = [each.metric for each in search.objectives]
    directions = [each.direction for each in search.objectives]
    found: dict[str, Any] = {
        "search.metric": metrics if several else metrics[0],
        "search.direction": directions if several else directions[0],
    }
    if search.limits:
        found["search.constraints"] = sorted(map(str, search.limits))
    return found


def difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each key in which two problems differ."""
    unset = "(not set)"
    return [
        f"{key}: was {stored.get(key, unset)}, now {current.get(key, unset)}"
        for key in sorted(stored.keys() | current.keys())
        if stored.get(key, unset) != current.get(key, unset)
    ]


def _covered(key: str, swept: Mapping[str, str]) -> bool:
    """Whether a job's key is searched, directly or with its whole group."""
    return key in swept or key.split(".")[0] in swept


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def create(name: str, objectives: Sequence[Objective], identity: Identity, storage: BaseStorage) -> Study:
    """Create a signed study that names its objectives."""
    directions = [StudyDirection[each.direction.upper()] for each in objectives]
    study = optuna.create_study(study_name=name, storage=storage, directions=directions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([each.metric for each in objectives])
    sign(study, identity)
    return study


def sign(study: Study, identity: Identity) -> None:
    """Write the missing parts of a study's signature; its creator may have been killed while signing."""
    if TOKEN not in study.user_attrs:
        study.set_user_attr(TOKEN, uuid4().hex[:12])
    if PROBLEM not in study.user_attrs:
        study.set_user_attr(PROBLEM, identity.problem_json)


def check_problem(study: Study, identity: Identity) -> None:
    """Check that the study has this problem, or is an empty one without a signature.

    Raises:
        SearchError: it has another problem, or was not made by Plait.
    """
    stored = study.user_attrs.get(PROBLEM)
    if stored is None and study.get_trials(deepcopy=False):
        raise SearchError(
            f"search.name={study.study_name}",
            "This study was not created by Plait.",
            "Choose another search.name, or start again with search.fresh=true.",
        )
    lines = difference(json.loads(stored), json.loads(identity.problem_json)) if stored is not None else []
    if lines:
        more = [f"and {len(lines) - MOST_LINES} more settings"] if len(lines) > MOST_LINES + 1 else []
        rule = "\n".join(lines[:MOST_LINES] + more if more else lines)
        raise SearchError(
            f"search.name={study.study_name}: the study belongs to another search", rule, RESTORE
        )


def _changed(key: str, stored: Mapping[str, str], material: Mapping[str, str]) -> str:
    """What changed, in words where they are known: a search that was started before has digests alone."""
    was, now = stored.get(ROWS + key), material.get(ROWS + key)
    if was is None or now is None:
        return f"{key}: was {stored[key]}, now {material[key]}"
    if was == now:
        return f"The content changed of {now}."
    return f"It was {was}; now it is {now}."


def check_material(study: Study, material: Mapping[str, str]) -> None:
    """Check that data and model are those that the search began with; new ones are added.

    Args:
        material: maps what it is to its digest; with ``ROWS`` before it, to its rows in words.

    Raises:
        SearchError: a digest has changed.
    """
    stored = json.loads(study.user_attrs.get(MATERIAL, "{}"))
    both = sorted(key for key in stored.keys() & material.keys() if not key.startswith(ROWS))
    if lines := [_changed(key, stored, material) for key in both if stored[key] != material[key]]:
        raise SearchError(
            f"search.name={study.study_name}: it was started with other data or another model",
            "\n".join(lines),
            RESTORE,
        )
    study.set_user_attr(MATERIAL, json.dumps(stored | dict(material), sort_keys=True))

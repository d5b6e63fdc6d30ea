"""How a study is signed: what it searches, with what, and which study of its name it is."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from uuid import uuid4

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection

from plait.core.errors import SearchError
from plait.core.objectives import Objective
from plait.search.identity import Identity, difference

PROBLEM = "plait.problem"  # what is searched, as JSON
MATERIAL = "plait.material"  # digests of data and model, as JSON
TOKEN = "plait.study"  # tells the study from an earlier one of its name


def create(name: str, objectives: Sequence[Objective], identity: Identity, storage: BaseStorage) -> Study:
    """A new study, signed, that names its objectives."""
    directions = [StudyDirection[each.direction.upper()] for each in objectives]
    study = optuna.create_study(study_name=name, storage=storage, directions=directions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([each.metric for each in objectives])
    sign(study, identity)
    return study


def sign(study: Study, identity: Identity) -> None:
    """Write what is missing of a study's signature: its maker may have been killed while it signed."""
    if TOKEN not in study.user_attrs:
        study.set_user_attr(TOKEN, uuid4().hex[:12])
    if PROBLEM not in study.user_attrs:
        study.set_user_attr(PROBLEM, identity.problem_json)


def check_problem(study: Study, identity: Identity) -> None:
    """The study searches what is asked for; an empty one that nobody has signed is signed.

    Raises:
        SearchError: it searches something else, or Plait did not make it.
    """
    stored = study.user_attrs.get(PROBLEM)
    remedy = "Choose another search.name, or start it anew with search.fresh=true."
    if stored is None and study.get_trials(deepcopy=False):
        raise SearchError(f"search.name={study.study_name}", "Plait did not make this study.", remedy)
    lines = difference(json.loads(stored), json.loads(identity.problem_json)) if stored is not None else []
    if lines:
        raise SearchError(
            f"search.name={study.study_name}: the study belongs to another search", "\n".join(lines), remedy
        )
    sign(study, identity)


def check_material(study: Study, material: Mapping[str, str]) -> None:
    """Data and model are those that the search began with; what it had not met yet is added.

    Args:
        study: of the search.
        material: what it is to its digest.

    Raises:
        SearchError: something has another digest than before.
    """
    stored = json.loads(study.user_attrs.get(MATERIAL, "{}"))
    both = stored.keys() & material.keys()
    if lines := difference({key: stored[key] for key in both}, {key: material[key] for key in both}):
        raise SearchError(
            f"search.name={study.study_name}: it began with other data or another model",
            "\n".join(lines),
            "Put back what it began with, choose another search.name, or start it anew with "
            "search.fresh=true.",
        )
    study.set_user_attr(MATERIAL, json.dumps(stored | dict(material), sort_keys=True))

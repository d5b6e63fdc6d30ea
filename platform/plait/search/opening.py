"""Opening the study of a search: made, gone on with, or begun anew."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import TrialState

from plait.core.errors import SearchError
from plait.core.settings import SearchSettings
from plait.core.space import Space
from plait.engine.checkpoints import remove_checkpoints
from plait.search.attributes import TOKEN
from plait.search.identity import Identity, check_problem, create
from plait.search.ownership import Workers, trainer_of
from plait.search.prior import check_prior
from plait.search.storage import study_lock
from plait.search.trials import Trial


def open_study(
    name: str,
    settings: SearchSettings,
    space: Space,
    identity: Identity,
    storage: BaseStorage,
    prior_storage: BaseStorage,
    folder: Path | None,
    workers: Workers | None,
) -> Study:
    """The study of a search, which is made where there is none.

    Args:
        name: of the search.
        settings: of the search.
        space: what is searched.
        identity: of the search.
        storage: of the study.
        prior_storage: of the earlier study that ``search.prior`` names.
        folder: of the search on disk.
        workers: this process among others.

    Raises:
        SearchError: the study has another space, it is to be begun anew while others train it, or
            ``search.prior`` has nothing to say.
    """
    with study_lock(storage, name):
        known = name in optuna.get_all_study_names(storage)
        if not known or settings.fresh:  # before anything is made or deleted
            check_prior(name, settings, space, prior_storage)
        if known:
            study = optuna.load_study(study_name=name, storage=storage)
            if not settings.fresh:
                check_problem(study, identity)
                return study
            _delete(study, storage, folder, workers)
        return create(name, settings.objectives, identity, storage)


def _delete(study: Study, storage: BaseStorage, folder: Path | None, workers: Workers | None) -> None:
    """Delete a study that is begun anew, with the states of its trials.

    Raises:
        SearchError: another process on this host trains it.
    """
    for item in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        owner = trainer_of(item)
        if workers is not None and owner is not None and workers.surely_lives(owner):
            raise SearchError(
                f"search.fresh=true: search.name={study.study_name} is being trained by another process",
                f"It has {Trial(item.number).name}; what it trains would be lost.",
                "End that process first, or choose another search.name.",
            )
    if folder is not None and (token := study.user_attrs.get(TOKEN)):
        remove_checkpoints(folder / "checkpoints" / token)
    optuna.delete_study(study_name=study.study_name, storage=storage)

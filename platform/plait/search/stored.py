"""What a stored study says of a search: how much each searched key matters, and its objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.importance import get_param_importances
from optuna.trial import FrozenTrial, TrialState

from plait.core.errors import StorageError
from plait.search.storage import JOURNAL, SQLITE, open_storage
from plait.utils.addresses import redact

METHOD = "PED-ANOVA"  # Optuna's default: Watanabe, Bansal, Hutter (2023), "PED-ANOVA", IJCAI
LEAST_TRIALS = 5  # of fewer the shares are those of chance
ENOUGH_FOR_ONE_KEY = 10  # complete trials; below that a share says little


@dataclass(frozen=True, slots=True)
class Importance:
    """Shares of the searched keys, adding up to 1, largest first.

    Attributes:
        trials: complete ones that the shares rest upon.
        trouble: why there are no shares; "" where there are.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    trials: int = 0
    trouble: str = "No study was asked."

    @property
    def few(self) -> bool:
        """Too few trials for the shares to be more than a hint."""
        return self.trials < ENOUGH_FOR_ONE_KEY * max(len(self.shares), 1)


@dataclass(frozen=True, slots=True)
class StudyObjective:
    """One objective of a study: its value by trial number, of complete trials."""

    name: str
    direction: str
    values: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """What a stored study says beyond what MLflow holds."""

    importance: Importance = field(default_factory=Importance)
    objectives: tuple[StudyObjective, ...] = ()


def read_study(storage: str | None, root: Path, name: str) -> StudyFacts:
    """Importance of every key of a study's space, and its objectives; whatever is in the way is told in
    ``importance.trouble``, not raised.

    Args:
        storage: ``search.storage``.
        root: ``tracking.root``.
        name: of the search.
    """
    try:
        study = stored_study(storage, root, name)
        return StudyFacts(_importance(study), _objectives(study))
    except StorageError as error:
        return StudyFacts(Importance(trouble=error.rule))


class NoStudyError(StorageError):
    """There is no study of this name, or its file is gone."""


def stored_study(storage: str | None, root: Path, name: str) -> optuna.Study:
    """A study to be read; nothing is made for it.

    Args:
        storage: ``search.storage``.
        root: ``tracking.root``.
        name: of the search.

    Raises:
        NoStudyError: it is not there.
        StorageError: its storage does not answer.
    """
    where = redact(storage or str(root / JOURNAL))
    if "***" in (storage or ""):
        raise StorageError(where, "The study's address holds a password, which is not kept with the search.")
    if (missing := _missing_file(storage, root)) is not None:
        raise NoStudyError(where, f"The study's file {missing} is not here.")
    opened = open_storage(storage, root)
    if name not in optuna.get_all_study_names(opened):
        raise NoStudyError(where, f"The study {name} is not in its storage any more.")
    return optuna.load_study(study_name=name, storage=opened)


def _missing_file(storage: str | None, root: Path) -> Path | None:
    """The file that opening the storage would make anew: reading makes none."""
    if storage is None:
        path = root / JOURNAL
    elif "://" not in storage:
        path = Path(storage).expanduser()
    elif storage.startswith(SQLITE):
        path = Path(storage.removeprefix(SQLITE))
    else:
        return None
    return None if path.exists() else path


def _objectives(study: optuna.Study) -> tuple[StudyObjective, ...]:
    names = study.metric_names or [f"objective {at}" for at, _ in enumerate(study.directions, 1)]
    trials = [item for item in study.get_trials(deepcopy=False) if _usable(item)]
    return tuple(
        StudyObjective(name, direction.name.lower(), {item.number: item.values[at] for item in trials})
        for at, (name, direction) in enumerate(zip(names, study.directions, strict=True))
    )


def _importance(study: optuna.Study) -> Importance:
    trials = [item for item in study.get_trials(deepcopy=False) if _usable(item)]
    if len(trials) < LEAST_TRIALS:
        rule = f"Importance needs at least {LEAST_TRIALS} finished trials."
        return Importance(trials=len(trials), trouble=f"{rule} There are {len(trials)}.")
    if len({tuple(item.values) for item in trials}) == 1:
        return Importance(trials=len(trials), trouble="All finished trials have the same objective.")
    try:
        shares = get_param_importances(study)  # for what the study's directions call better
    except (ValueError, RuntimeError) as error:
        return Importance(trials=len(trials), trouble=str(error))
    if not shares or not all(math.isfinite(value) for value in shares.values()):
        return Importance(trials=len(trials), trouble="No key was varied in all finished trials.")
    return Importance(dict(sorted(shares.items(), key=lambda pair: -pair[1])), len(trials), "")


def _usable(item: FrozenTrial) -> bool:
    return (
        item.state == TrialState.COMPLETE and item.values is not None and all(map(math.isfinite, item.values))
    )

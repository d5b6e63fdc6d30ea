"""Deletes a search: its folder, its study and its runs in MLflow; also one that never began.

The seam to `plait forget`, which asks first. It is imported only then, because Optuna and MLflow are slow to
import.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.study import Study

from plait.core.errors import SearchError
from plait.core.settings import TrackingSettings
from plait.search.attributes import TRACKED
from plait.search.locks import WORKERS, living
from plait.search.ownership import process_id
from plait.search.recorded import RecordedCommand, given, read_command
from plait.search.storage import quiet, study_lock
from plait.search.stored import NoStudyError, hosts_of, stored_study
from plait.tracking.location import locate, sqlite_in
from plait.tracking.results import delete_runs, stored_runs
from plait.tracking.search_run import left_unsent
from plait.utils.counts import counted
from plait.utils.files import disk_errors
from plait.utils.paths import command_on, search_folder, user_path

ADAPTERS = "adapters"
EXPERIMENT = "tracking.experiment"


@dataclass(frozen=True, slots=True)
class Remains:
    """Everything that a search has left behind.

    Attributes:
        size: bytes of the folder.
        adapters: how many were exported to it.
        tracking: the store of its runs.
        runs: MLflow ids of its runs, the jobs' first.
        unsent: records in the folder that were not sent to the store, in words.
        elsewhere: number of unfinished trials that were begun on other hosts, by host.
    """

    name: str
    folder: Path
    size: int
    adapters: int
    study: Study | None
    tracking: TrackingSettings
    runs: tuple[str, ...]
    unsent: tuple[str, ...]
    elsewhere: Mapping[str, int]

    def describe(self, keep_adapters: bool) -> list[str]:
        """What is deleted and what is kept, in a few lines."""
        kept = self.adapters if keep_adapters else 0
        lines = [f"{self.folder} ({self.size / 2**20:.1f} MiB): checkpoints, records, command"]
        if self.adapters and not kept:
            lines[0] += f", {counted(self.adapters, 'exported adapter')} (--keep-adapters keeps them)"
        if self.study is not None:
            lines.append(f"its study, {counted(len(self.study.get_trials(deepcopy=False)), 'trial')}")
        if self.runs:
            where = locate(self.tracking)
            lines.append(
                f"{counted(len(self.runs), 'MLflow run')} in {where}, which `mlflow runs restore` restores "
                "until `mlflow gc` is run"
            )
        lines += [f"not yet sent to MLflow, will be lost: {text}" for text in self.unsent]
        for host, number in self.elsewhere.items():
            lines.append(
                f"{counted(number, 'trial')} started on host {host}: what still runs there will fail"
            )
        if kept:
            lines.append(f"{counted(kept, 'adapter')} kept in {self.folder / ADAPTERS}")
        return lines

    def remove(self, keep_adapters: bool) -> None:
        """Delete it, the runs first and the folder last, so that a failed attempt can be repeated.

        Raises:
            SearchError: a process of this host has begun to train it.
            StorageError: the study, the store or the folder cannot be written.
        """
        _check_nobody(self.tracking.root, self.name)
        delete_runs(self.tracking, self.runs)
        if self.study is not None:
            storage = self.study._storage
            with study_lock(storage, self.name):
                _check_nobody(self.tracking.root, self.name)
                optuna.delete_study(study_name=self.name, storage=storage)
        kept = ADAPTERS if keep_adapters and self.adapters else None
        with disk_errors(self.folder, "The files of the search cannot be removed."):
            _empty(self.folder, kept)


def find_remains(root: Path, name: str) -> Remains:
    """Everything left of a search with a folder below ``root``.

    Raises:
        SearchError: a process of this host trains it.
        StorageError: its study or its store does not answer, or its command cannot be read.
    """
    quiet()
    _check_nobody(root, name)
    root, folder = user_path(root).absolute(), search_folder(root, name)
    recorded = read_command(root, name) or RecordedCommand(name, "sweep", (), str(root))
    study = None
    with suppress(NoStudyError):
        study = stored_study(recorded.storage, root, name)
    experiment = given(recorded.arguments, EXPERIMENT) or TrackingSettings().experiment
    tracking = TrackingSettings(
        uri=recorded.store or sqlite_in(root.resolve()), root=root, experiment=experiment
    )
    run_id = "" if study is None else str(study.user_attrs.get(TRACKED, ("",))[0])
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Remains(
        name,
        folder,
        sum(path.stat().st_size for path in files),
        sum(1 for _ in (folder / ADAPTERS).glob("*/adapter_config.json")),
        study,
        tracking,
        tuple(stored_runs(tracking, name, run_id)),
        tuple(left_unsent(tracking, name)),
        {} if study is None else Counter(filter(None, hosts_of(study.get_trials(deepcopy=False)))),
    )


def _check_nobody(root: Path, name: str) -> None:
    if alive := living(search_folder(root, name) / WORKERS):
        processes = ", ".join(map(process_id, alive))
        raise SearchError(
            f"{name} is being trained by process {processes}",
            "A search cannot be deleted while a process trains it.",
            f"Stop it first: `{command_on(root, 'control', name, 'cancel')}`.",
        )


def _empty(folder: Path, kept: str | None) -> None:
    """Remove a folder, or everything in it except ``kept``."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if kept is None:
        folder.rmdir()

"""Reads finished and running searches for the command line: leaderboard, export and deletion."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run

from plait.core.errors import SearchError, StorageError
from plait.core.lifecycle import JobState
from plait.core.objectives import Objective, best_first, best_of
from plait.core.settings import TrackingSettings
from plait.tracking import names
from plait.tracking.connection import check_place, open_store, storage_errors
from plait.tracking.event_log import time_ms
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.location import Location, locate, sqlite_in
from plait.tracking.mlflow_store import Store, job_record, stored_leaderboard
from plait.tracking.records import LogPoints
from plait.tracking.ui import page_tag, search_page
from plait.utils.addresses import redact
from plait.utils.counts import counted, listed
from plait.utils.files import disk_errors
from plait.utils.paths import begun_name, cache_dir, command_on, no_such_search
from plait.utils.progress import say

OTHER_FOLDER = "Choose a folder in a writable one."
SHOWN = 20  # most searches or trials listed in a remedy


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A search as read from the store.

    Attributes:
        objectives: the first one counts for the order of its jobs.
        records: its jobs, best objective first.
    """

    name: str
    state: JobState
    objectives: tuple[Objective, ...]
    run_id: str
    experiment_id: str
    location: Location
    records: tuple[JobRecord, ...]

    @property
    def best(self) -> JobRecord | None:
        """The best finished job; None if there is none, and of several objectives, which have a front."""
        return None if self.objectives[1:] else best_of(self.records, self.objectives[0])


def opening(name: str, settings: TrackingSettings) -> str:
    """The call that opens a search again from Python, from the present working directory."""
    usual = TrackingSettings()
    parts = [repr(name)]
    if settings.root.absolute() != usual.root.absolute():
        parts.append(f"root={str(settings.root)!r}")
    if settings.uri is not None:
        parts.append(f"uri={redact(settings.uri)!r}")
    if settings.experiment != usual.experiment:
        parts.append(f"experiment={settings.experiment!r}")
    return f"plait.open({', '.join(parts)})"


def load_search(settings: TrackingSettings, name: str | None = None) -> SearchResult:
    """A search with its jobs, by name or run id, also of one of its jobs, or the newest.

    Raises:
        SearchError: there is none with that name, or none at all.
        StorageError: the store cannot be used.
    """
    return _result(*_find(settings, name))


def search_address(
    settings: TrackingSettings, name: str | None, address: str, say: Callable[[str], None] = print
) -> str:
    """The address of a search in MLflow's pages at ``address``, by name or run id, or the newest; ``address``
    if there is no search yet. ``say`` tells the user where the pages have no artifacts, and what helps.

    Raises:
        SearchError: there is none with that name.
        StorageError: the store cannot be used.
    """
    try:
        store, run = _find(settings, name)
    except SearchError:
        if name is not None:
            raise
        return address
    try:
        check_place(store)
    except StorageError as error:  # losses are in the database
        say(str(error))
    run_id = run.data.tags.get(names.TAG_PARENT, run.info.run_id)
    return search_page(address, store.experiment_id, run_id)


def _result(store: Store, run: Run) -> SearchResult:
    with storage_errors(store.location):
        if parent := run.data.tags.get(names.TAG_PARENT):  # the id of a job was given
            run = store.client.get_run(parent)
        children = store.children(run.info.run_id)
    tags = run.data.tags
    board = stored_leaderboard(run, children)
    _say_missing(run, board)
    return SearchResult(
        name=tags[names.TAG_SEARCH],
        state=JobState(tags[names.TAG_STATE]),
        objectives=(Objective(tags[names.TAG_METRIC], board.direction), *board.others),
        run_id=run.info.run_id,
        experiment_id=store.experiment_id,
        location=store.location,
        records=tuple(board.ordered()),
    )


def _say_missing(run: Run, board: Leaderboard) -> None:
    """Say how many trials of a finished search have no run here: what is best here need not be the best."""
    if run.data.tags[names.TAG_STATE] != JobState.FINISHED:
        return
    ended = int(run.data.metrics.get(names.SEARCH_ENDED, 0))
    missing = ended - sum(record.ended for record in board.jobs.values())
    if missing > 0:
        say(
            f"Of {counted(ended, 'trial')} that have ended, {missing} have no run in this store: they were "
            "recorded in another one, or deleted. A better one may be among them."
        )


def export(
    settings: TrackingSettings,
    name: str | None,
    destination: Path,
    *,
    trial: int | None = None,
    remedy: str = OTHER_FOLDER,
) -> tuple[JobRecord, Path]:
    """Copy an adapter's PEFT folder from the store into a folder that does not exist or is empty.

    Args:
        name: name of the search, or run id of a search or a job; None means the newest search.
        trial: number of the trial; None means the best.
        remedy: where the folder cannot be written.

    Raises:
        SearchError: the search or trial does not exist, or has no adapter.
        StorageError: the store or the folder cannot be used.
    """
    there = free_folder(destination, remedy)
    store, run = _find(settings, name)
    record = job_record(run) if names.TAG_TRIAL in run.data.tags else chosen(_result(store, run), trial)
    with storage_errors(store.location):
        files = store.client.list_artifacts(record.run_id, names.ADAPTER_FOLDER)
        if not files:
            check_place(store)
            board = command_on(settings.root, "leaderboard", run.data.tags[names.TAG_SEARCH])
            raise SearchError(
                f"{record.name} ({record.state}) has no adapter in {store.location}",
                "Only finished jobs have an adapter.",
                f"`{board}` shows which jobs have finished.",
            )
    needed, free = sum(each.file_size or 0 for each in files), shutil.disk_usage(there).free
    if needed > free:  # MLflow would only say that it has failed
        raise StorageError(
            f"{destination}: {free:,} bytes are free on its disk",
            f"The adapter has {needed:,}.",
            f"Free some space. {remedy}",
        )
    with disk_errors(destination, "The adapter cannot be written there.", remedy):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".export-") as folder:
            with storage_errors(store.location):
                copied = store.client.download_artifacts(record.run_id, names.ADAPTER_FOLDER, folder)
            if destination.exists():
                destination.rmdir()
            shutil.move(copied, destination)
    return record, destination


def free_folder(destination: Path, remedy: str = OTHER_FOLDER) -> Path:
    """Refuse a folder that exists and is not empty, or that cannot be made; nothing is left of trying.

    Returns:
        The folder above it that exists.

    Raises:
        StorageError: it is so.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise StorageError(
            f"{destination} already exists",
            "Exporting does not overwrite an existing folder.",
            "Choose a new folder.",
        )
    there = next(each for each in destination.absolute().parents if each.exists())
    with (
        disk_errors(destination, "It cannot be written there.", remedy),
        tempfile.TemporaryDirectory(dir=there, prefix=".export-"),
    ):
        return there  # an export may take minutes before it writes


def chosen(result: SearchResult, trial: int | None) -> JobRecord:
    """The job of a trial, or the best one.

    Raises:
        SearchError: there is none.
    """
    if trial is None:
        if front := [item for item in result.records if item.on_front]:
            rule = (
                f"It optimises {' and '.join(map(str, result.objectives))}, so there is no single best trial."
            )
            raise SearchError(
                f"search {result.name!r}: no trial was given",
                rule,
                f"Choose one from its front: {', '.join(str(item.trial) for item in front)}.",
            )
        if result.best is None:
            rule = "Without a trial number, the best finished trial is meant."
            finished = any(item.state == JobState.FINISHED for item in result.records)
            lacks = "no finished trial that satisfies its constraints" if finished else "no finished trial"
            usual, root = TrackingSettings().root, result.location.root
            root = usual if root == usual.absolute() else root
            board, resume = (command_on(root, verb, result.name) for verb in ("leaderboard", "resume"))
            # The store has no state of a trial whose process was killed; the leaderboard asks the study.
            begun = f"`{board}` shows its trials, `{resume}` resumes it if it was ended."
            remedy = _trials(result.records) if finished else begun
            raise SearchError(f"search {result.name!r} has {lacks}", rule, remedy)
        return result.best
    found = next((item for item in result.records if item.trial == trial), None)
    if found is None:
        rule = "The trial must belong to the search."
        raise SearchError(f"trial {trial} of search {result.name!r}", rule, _trials(result.records))
    return found


def trained(result: SearchResult, trials: Sequence[int] | None = None) -> list[JobRecord]:
    """The jobs of these trials or, if none is named, all that have finished.

    Raises:
        SearchError: there is none.
    """
    if trials:
        return [chosen(result, trial) for trial in dict.fromkeys(trials)]
    finished = [record for record in result.records if record.state == JobState.FINISHED]
    if not finished:
        raise SearchError(f"search {result.name!r} has no finished trial", "Only these have an adapter.")
    return finished


def leading(result: SearchResult, count: int) -> list[JobRecord]:
    """So many of the best jobs, the best first, or all if there are fewer; of several objectives, of their
    front.

    Raises:
        SearchError: there is none.
    """
    front = [item for item in result.records if item.on_front]
    ranked = front if result.objectives[1:] else best_first(result.records, result.objectives[0])
    return ranked[:count] or [chosen(result, None)]


def _trials(records: Sequence[JobRecord]) -> str:
    if not records:
        return "It has no trials."
    trials = [f"{item.trial} ({item.state})" for item in sorted(records, key=lambda item: item.trial)]
    return f"It has {listed(trials, SHOWN)}."


def recorded_text(result: SearchResult, settings: TrackingSettings, path: str) -> str:
    """A text artifact of a search's run.

    Raises:
        StorageError: the store does not have it, or does not answer.
    """
    store = open_store(result.location, settings.experiment, reading=True)
    try:
        with storage_errors(result.location), tempfile.TemporaryDirectory() as folder:
            file = store.client.download_artifacts(result.run_id, path, folder)
            return Path(file).read_text(encoding="utf-8")
    except StorageError:
        check_place(store)
        raise


def record_values(
    settings: TrackingSettings, search: SearchResult, record: JobRecord, values: Mapping[str, float]
) -> None:
    """Log metrics of a job that has ended to its run, at its last step.

    Raises:
        StorageError: the store does not answer, or refuses.
    """
    store = open_store(search.location, settings.experiment)
    with storage_errors(search.location):
        point = LogPoints(record.run_id, record.step, time_ms(), values)
        store.update(record.run_id, [point], {})


def record_texts(
    settings: TrackingSettings, search: SearchResult, rows: Sequence[Mapping[str, object]]
) -> None:
    """Add generated texts to a search's run, as rows of an artifact that MLflow's pages show as a table.

    Raises:
        StorageError: the store does not answer, or refuses.
    """
    store = open_store(search.location, settings.experiment)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    with storage_errors(search.location):
        store.client.log_table(search.run_id, columns, names.TEXTS_FILE)


def store_to_read(settings: TrackingSettings) -> Store | None:
    """The store to read from; None if its SQLite file does not exist yet, because reading does not make
    one."""
    location = locate(settings)
    if location.sqlite_file is not None and not location.sqlite_file.exists():
        return None
    return open_store(location, settings.experiment, reading=True)


def _find(settings: TrackingSettings, name: str | None) -> tuple[Store, Run]:
    store = store_to_read(settings)
    there: list[str] = []
    if store is not None:
        with storage_errors(store.location):
            found = next(iter(store.searches(name)), None) or (_run_by_id(store, name) if name else None)
            if found is not None:
                return store, found
            there = list(dict.fromkeys(run.data.tags[names.TAG_SEARCH] for run in store.searches()))
    if name and (whole := begun_name(name, there)) != name:
        return _find(settings, whole)
    where = f"{locate(settings)}, experiment {settings.experiment!r}"
    if name:
        raise no_such_search(name, where, there)
    raise SearchError(
        f"no search in {where}",
        "The search must exist in this store.",
        "Start one with `plait sweep`, or name the folder of its searches (tracking.root=FOLDER).",
    )


def _run_by_id(store: Store, text: str) -> Run | None:
    """The run whose id the text is, if any."""
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        return None
    return store.run(text)


def stored_runs(settings: TrackingSettings, name: str, run_id: str) -> list[str]:
    """MLflow's ids of a search's runs, the jobs' first.

    In the folder of the runs, where no other search has its name, these are the runs of all its starts. In
    other stores another person may have a search of this name, so only the run known to belong to it counts:
    ``run_id``, as in its study; "" if that is not known.

    Raises:
        AwayError, StorageError: the store does not answer, or refuses.
    """
    store = store_to_read(settings)
    if store is None:
        return []
    location = locate(settings)
    with storage_errors(location):
        parents = [run.info.run_id for run in store.searches(name)]
        if location.uri != sqlite_in(location.root):
            parents = [parent for parent in parents if parent == run_id]
        jobs = [run.info.run_id for parent in parents for run in store.all_children(parent)]
    return [*jobs, *parents]


def fetched_folder(run_id: str) -> Path:
    """The folder in the cache of an adapter that was fetched from the store."""
    return cache_dir() / "adapters" / run_id


def delete_runs(settings: TrackingSettings, run_ids: Sequence[str]) -> None:
    """Delete runs as MLflow does: they are hidden, and `mlflow runs restore` brings them back until `mlflow
    gc`. Adapters of theirs that were fetched go, too.

    Raises:
        AwayError, StorageError: the store does not answer, or refuses.
    """
    for run_id in run_ids:
        shutil.rmtree(fetched_folder(run_id), ignore_errors=True)
    store = store_to_read(settings) if run_ids else None
    if store is not None:
        with storage_errors(store.location):
            shown = store.client.get_experiment(store.experiment_id).tags
            for run_id in run_ids:
                store.client.delete_run(run_id)
                if (tag := page_tag(run_id)) in shown:
                    store.client.delete_experiment_tag(store.experiment_id, tag)

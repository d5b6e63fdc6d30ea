"""Where a search is recorded. This is stored in the study, so a search can resume while the tracking store is
unavailable."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.storages import BaseStorage

from plait.core.lifecycle import JobResult, JobState
from plait.core.settings import RunSettings, TrackingSettings
from plait.search.attributes import TRACKED
from plait.search.recorded import recorded_command
from plait.search.storage import Patience, quiet
from plait.search.stored import read_standing, stored_study
from plait.search.study import StudyTrials
from plait.search.trials import Trial
from plait.tracking.connection import AwayError, check_tracking
from plait.tracking.event_log import logs_folder
from plait.tracking.figures import Figures
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.location import locate, sqlite_in
from plait.tracking.results import SearchResult
from plait.tracking.search_run import conclude, left_unsent, send_left
from plait.utils.paths import user_path


def ask_store(settings: RunSettings) -> AwayError | None:
    """Check that the tracking store can be used; return the error if it does not answer now.

    Raises:
        StorageError: it refuses; see ``check_tracking``.
    """
    try:
        check_tracking(settings.tracking)
    except AwayError as error:
        return error
    return None


def tracked_run(storage: BaseStorage | None, name: str, settings: RunSettings, away: AwayError | None) -> str:
    """MLflow's id of a search's run, if it was recorded in the settings' store before; else "". Creates no
    study.

    Args:
        away: the error, if the store does not answer now.

    Raises:
        AwayError: it was not, and the store is unavailable, so its address cannot be checked.
    """
    run_id, store = "", ""
    if storage is not None and not settings.search.fresh:
        run_id, store = Patience()(lambda: _tracked(storage, name))
    here = str(locate(settings.tracking))
    if store == here:
        return run_id
    if away is None:
        return ""
    if store:
        remedy = f"Use tracking.uri={store}, where the search has been recorded so far, or start {here}."
        raise AwayError(away.value, away.rule, remedy)
    raise away


def _tracked(storage: BaseStorage, name: str) -> tuple[str, str]:
    try:
        attributes = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
    except KeyError:
        return "", ""
    run_id, store = attributes.get(TRACKED, ("", ""))
    return str(run_id), str(store)


def without_store(away: AwayError, settings: RunSettings, name: str) -> str:
    """What to say if a search resumes without its store."""
    folder = logs_folder(user_path(settings.tracking.root).absolute(), name)
    return f"{away.value}. Records are buffered in {folder} and sent when it answers."


def catch_up(
    settings: RunSettings, source: StudyTrials, results: Sequence[JobResult]
) -> tuple[list[str], bool]:
    """Complete the search's run, if a process was killed after the last trial or could not reach the store.

    Returns:
        What could not be done, in words, and whether the run is complete now.

    Raises:
        StorageError: the store refuses.
    """
    tracking = settings.tracking
    recorded = recorded_command(tracking.root, source.name)
    if recorded is not None and recorded.concluded and not left_unsent(tracking, source.name):
        return [], True
    try:
        if notices := send_left(tracking, source.name):
            return notices, False
        with source.shared.holding("run"):
            run_id = conclude(tracking, source.name, source.token, results)
            if run_id is None:
                return [], True
            figures = Figures(tracking, run_id, settings.search.storage)
            figures.publish(final=True)
    except AwayError as error:
        unsent = left_unsent(tracking, source.name)
        later = f"{error.value}. When it answers, run the same command again to complete the search's run."
        return unsent or [later], False
    return [figures.trouble] if figures.trouble else [], True


def board_of_study(settings: TrackingSettings, name: str) -> SearchResult | None:
    """What the study knows about a search that is recorded in this store: states, values and objectives, but
    no losses, tokens or seconds. None if this search was not begun in the folder of the runs.

    Raises:
        StorageError: the study does not answer.
    """
    location = locate(settings)
    recorded = recorded_command(location.root, name)
    if recorded is None or (recorded.store or sqlite_in(location.root)) != location.uri:
        return None
    quiet()
    standing = read_standing(stored_study(recorded.storage, location.root, name))
    first, *others = standing.objectives
    board = Leaderboard(first.direction, len(standing.trials), others=tuple(others))
    for trial in standing.trials:
        name = Trial(trial.number).name
        board.add(JobRecord(name, trial.number, state=trial.state, outside=trial.outside))
    for result in standing.result.finished:
        board.jobs[result.job].parameters = result.parameters
        board.take_result(result)
    return SearchResult(
        name=name,
        state=JobState.FINISHED if recorded.finished else JobState.PAUSED,
        direction=first.direction,
        metric=first.metric,
        run_id="",
        experiment_id="",
        location=location,
        records=tuple(board.ordered()),
        others=tuple(others),
    )

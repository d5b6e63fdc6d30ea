"""A search's leaderboard from its study, while the tracking store is away."""

from __future__ import annotations

from plait.core.lifecycle import JobState
from plait.core.settings import TrackingSettings
from plait.search.recorded import recorded_command
from plait.search.standing import read_standing
from plait.search.storage import quiet
from plait.search.trials import Trial
from plait.tracking import Board, JobRecord, SearchResult, locate
from plait.tracking.location import sqlite_in


def board_of_study(settings: TrackingSettings, name: str) -> SearchResult | None:
    """What the study knows of a search that is recorded in this store: states, values and objectives, but
    neither losses nor tokens nor seconds. None where no such search was begun in the folder of the runs.

    Raises:
        StorageError: the study does not answer.
    """
    location = locate(settings)
    recorded = recorded_command(location.root, name)
    if recorded is None or (recorded.store or sqlite_in(location.root)) != location.uri:
        return None
    quiet()
    standing = read_standing(recorded, location.root)
    first, *others = standing.objectives
    board = Board(first.direction, len(standing.states), others=tuple(others))
    for number, state in enumerate(standing.states):
        board.add(JobRecord(Trial(number).name, number, state=state))
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

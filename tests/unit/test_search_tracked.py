"""Which searches may begin without their tracking store: those that were recorded in just this one before."""

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage
from sqlalchemy.exc import OperationalError

from plait.core.settings import RunSettings, SearchSettings, TrackingSettings
from plait.search.attributes import TRACKED
from plait.search.checks import tracked_run
from plait.search.launch import without_store
from plait.search.recorded import RecordedCommand, write_command
from plait.search.storage import in_memory, open_storage
from plait.search.stored import board_of_study
from plait.tracking.connection import AwayError, _is_away
from plait.tracking.location import Location
from plait.utils.paths import search_folder

HERE, THERE = "http://here:5000", "http://there:5000"
AWAY = AwayError(f"tracking.uri={HERE}: no answer", "One must answer.", "Start it.")


@pytest.fixture
def storage() -> BaseStorage:
    """With a study whose search is recorded, one whose first start came to nothing, and no other."""
    made = in_memory()
    optuna.create_study(study_name="mine", storage=made).set_user_attr(TRACKED, ("run-1", HERE))
    optuna.create_study(study_name="new", storage=made)
    return made


def settings(uri: str, *, fresh: bool = False) -> RunSettings:
    return RunSettings(search=SearchSettings(fresh=fresh), tracking=TrackingSettings(uri=uri))


@pytest.mark.parametrize("away", [None, AWAY])
def test_a_search_that_was_recorded_there_needs_no_answer(
    storage: BaseStorage, away: AwayError | None
) -> None:
    assert tracked_run(storage, "mine", settings(HERE), away) == "run-1"


@pytest.mark.parametrize(
    ("name", "uri", "fresh"),
    [("mine", THERE, False), ("mine", HERE, True), ("new", HERE, False), ("unknown", HERE, False)],
)
def test_any_other_does(storage: BaseStorage, name: str, uri: str, fresh: bool) -> None:
    wanted = settings(uri, fresh=fresh)
    assert tracked_run(storage, name, wanted, None) == ""
    with pytest.raises(AwayError):
        tracked_run(storage, name, wanted, AWAY)
    assert sorted(optuna.get_all_study_names(storage)) == ["mine", "new"]


def test_another_address_than_the_searchs_is_reported_with_both(storage: BaseStorage) -> None:
    with pytest.raises(AwayError, match=f"Use tracking.uri={HERE}.*or start {THERE}"):
        tracked_run(storage, "mine", settings(THERE), AWAY)


def test_the_message_names_address_and_folder(tmp_path: Path) -> None:
    here = settings(HERE)
    here = replace(here, tracking=replace(here.tracking, root=tmp_path))
    said = without_store(AWAY, here, "mine")
    folder = f"{tmp_path}/searches/mine/events"
    assert said == f"{AWAY.value}. Records are buffered in {folder} and sent when it answers."


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("connection failed: Connection refused", True),
        ("FATAL:  the database system is starting up", True),
        ("FATAL:  sorry, too many clients already", True),
        ("FATAL:  canceling authentication due to timeout", True),
        ("FATAL:  server login has been failing, try again later (server_login_retry)", True),
        ('FATAL:  password authentication failed for user "me"', False),
        ('FATAL:  database "plait" does not exist', False),
    ],
)
def test_a_database_that_refuses_is_not_unavailable(text: str, away: bool) -> None:
    location = Location("postgresql+psycopg://me@host/plait", Path("/runs"), None)
    error = OperationalError("", None, Exception(text))
    assert _is_away(location, error) is away
    assert not _is_away(replace(location, uri="sqlite:////runs/mlflow.db"), error)


def test_the_leaderboard_read_from_the_study_has_the_searchs_name_and_its_trials(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="mine", storage=open_storage(None, tmp_path))
    for value in (2.0, 1.0):
        study.tell(study.ask(), value)
    write_command(search_folder(tmp_path, "mine"), RecordedCommand("mine", "sweep", (), str(tmp_path)))
    found = board_of_study(TrackingSettings(root=tmp_path), "mine")
    assert found is not None
    assert (found.name, found.state, [each.trial for each in found.records]) == ("mine", "paused", [1, 0])
    assert all(record.searched_only for record in found.records), "their other settings are as in MLflow"
    assert board_of_study(TrackingSettings(root=tmp_path), "another") is None

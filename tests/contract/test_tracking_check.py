"""Bad addresses, folders and databases are found within seconds, before any model loads."""

import errno
import fcntl
import os
import shlex
import shutil
import socket
import sqlite3
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import study_process
from forked import Talking
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError

from plait.core.errors import StorageError
from plait.core.settings import TrackingSettings
from plait.tracking import connection
from plait.tracking.connection import AwayError, check_tracking, open_store, storage_errors
from plait.tracking.location import locate
from plait.utils.addresses import first_line, redact

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _no_address_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where connections are accepted and never answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def refuse(settings: TrackingSettings, *parts: str) -> None:
    """The settings are refused, with each of the parts in the message."""
    with pytest.raises(StorageError) as caught:
        check_tracking(settings)
    assert isinstance(caught.value, AwayError) == ("no answer" in str(caught.value))
    assert caught.value.exit_status == 2
    assert caught.value.rule
    assert caught.value.remedy
    for part in parts:
        assert part in str(caught.value)


def test_the_default_is_an_absolute_sqlite_file_in_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    location = check_tracking(TrackingSettings(root=Path("runs")))
    assert str(location) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert location.artifacts == f"{tmp_path}/runs/artifacts"
    assert (tmp_path / "runs" / "mlflow.db").is_file()
    assert check_tracking(TrackingSettings(root=Path("runs"))) == location


def test_the_environment_counts_where_the_settings_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    settings = TrackingSettings(root=tmp_path)
    assert locate(settings).uri == f"sqlite:///{tmp_path}/other.db"
    assert locate(replace(settings, uri="http://host:5000")).uri == "http://host:5000"


def test_a_relative_sqlite_address_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(TrackingSettings(uri="sqlite:///a/b.db")).uri == f"sqlite:///{tmp_path}/a/b.db"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///data/mlruns", "sqlite://", "sqlite:///:memory:"])
def test_addresses_that_mlflow_cannot_write_to(tmp_path: Path, uri: str) -> None:
    refuse(TrackingSettings(uri=uri, root=tmp_path), repr(uri), "sqlite:///")


@pytest.mark.parametrize("uri", ["http://a..b", f"http://{'a' * 70}.org", "http://x:99999"])
def test_addresses_of_no_server(tmp_path: Path, uri: str) -> None:
    refuse(TrackingSettings(uri=uri, root=tmp_path), "no answer", "mlflow server")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    uri = f"http://127.0.0.1:{closed_port()}"
    refuse(TrackingSettings(uri=uri, root=tmp_path), uri, "no answer", "refused", "mlflow server")


def test_a_server_that_never_answers(
    tmp_path: Path, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)
    refuse(TrackingSettings(uri=f"http://127.0.0.1:{silent_port}", root=tmp_path), "no answer", "timed out")


def test_a_request_that_failed_is_told_by_its_server_and_fault_alone(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client tells of each of its layers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    for port, fault in ((closed_port(), "Connection refused"), (silent_port, "timed out")):
        with pytest.raises(MlflowException) as caught:
            MlflowClient(f"http://127.0.0.1:{port}").get_experiment_by_name("plait")
        assert len(str(caught.value)) > 200
        assert first_line(caught.value) == f"127.0.0.1:{port}: {fault}"


@pytest.mark.parametrize(
    ("status", "body", "away"),
    [(200, b"<html>", False), (404, b"<html>", False), (403, b"<html>", False), (503, b"<html>", True)],
)
def test_a_server_other_than_mlflow_does_not_count_as_unavailable(
    tmp_path: Path, status: int, body: bytes, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(StorageError) as caught:
            check_tracking(TrackingSettings(uri=f"http://127.0.0.1:{server.server_port}", root=tmp_path))
        server.shutdown()
    assert isinstance(caught.value, AwayError) == away, caught.value


def test_a_database_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    uri = f"postgresql://me:secret@127.0.0.1:{closed_port()}/plait"
    with pytest.raises(StorageError) as caught:
        check_tracking(TrackingSettings(uri=uri, root=tmp_path))
    assert "://me:***@127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_database_without_a_driver_is_named_without_its_password(tmp_path: Path) -> None:
    settings = TrackingSettings(uri="mssql://u:secret@h/x", root=tmp_path)
    refuse(settings, "mssql://u:***@h/x", "No module named")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("hello, this is a text and surely no database\n" * 100)
    refuse(TrackingSettings(root=tmp_path), "mlflow.db: the file is damaged", "not a database")


@pytest.mark.parametrize("name", ["SQLITE_FULL", "SQLITE_IOERR_WRITE"])
def test_a_database_file_without_space_is_no_matter_of_addresses(name: str, tmp_path: Path) -> None:
    cause = sqlite3.OperationalError("database or disk is full")
    cause.sqlite_errorname = name
    location, error = locate(TrackingSettings(root=tmp_path)), OperationalError("INSERT", {}, cause)
    with (
        pytest.raises(StorageError, match=r"(?s)database or disk is full.*Free some space") as caught,
        storage_errors(location),
    ):
        raise MlflowException("no") from error
    assert "db upgrade" not in str(caught.value)


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refuse(TrackingSettings(root=tmp_path / "file" / "runs"), "tracking.root=", "Not a directory")


def test_a_root_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_: object) -> None:  # tests may run as root, who may write anywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    refuse(TrackingSettings(root=tmp_path), "Permission denied", "to a writable folder")


def test_a_store_that_is_only_read_may_be_write_protected(
    new_store: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = locate(TrackingSettings(root=new_store()))
    written = open_store(location, "plait").experiment_id
    with monkeypatch.context() as patched:

        def refused(**_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        patched.setattr(tempfile, "TemporaryFile", refused)
        assert open_store(location, "plait", reading=True).experiment_id == written
        with pytest.raises(StorageError, match="Read-only"):
            open_store(location, "plait")


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is only a file would outlive a killed holder, and all others would wait forever."""

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    refuse(
        TrackingSettings(root=tmp_path), "Function not implemented", "does not support locks", "local disk"
    )
    assert not (tmp_path / "mlflow.db").exists()


def test_the_database_of_another_program_is_refused_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE notes (text TEXT)")
        database.commit()
    before = file.read_bytes()
    refuse(TrackingSettings(uri=f"sqlite:///{file}", root=tmp_path), str(file), "notes", "another program")
    assert file.read_bytes() == before


def test_several_processes_that_start_at_once_share_a_new_store(tmp_path: Path) -> None:
    processes = [Talking(study_process.open_tracking_store, str(tmp_path)) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["begins\n"] * 4
    for process in processes:
        process.stdin.write("\n")
    (found,) = {process.stdout.readline() for process in processes}
    assert found.strip().isdecimal()
    assert [process.wait() for process in processes] == [0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db"]


@pytest.mark.parametrize(
    ("uri", "hidden"),
    [
        ("http://me:pa/ss@127.0.0.1:5000", "pa"),
        ("http://me:pa ss@127.0.0.1:5000", "pa"),
        ("postgresql://me:pa@ss@127.0.0.1:1/db", "ss@"),
    ],
)
def test_a_password_that_would_be_taken_for_a_host_is_refused_and_hidden(
    tmp_path: Path, uri: str, hidden: str
) -> None:
    refuse(TrackingSettings(uri=uri, root=tmp_path), "me:***@127.0.0.1", "%2F")
    with pytest.raises(StorageError) as caught:
        locate(TrackingSettings(uri=uri, root=tmp_path))
    assert hidden not in caught.value.value


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * 2**20, 99 * 2**20, 2**20))
    refuse(TrackingSettings(root=tmp_path), "1 MiB free", "at least 64 MiB")


def test_an_experiment_that_was_deleted(new_store: Callable[[], Path]) -> None:
    settings = TrackingSettings(root=new_store(), experiment="gone")
    store = open_store(check_tracking(settings), "gone")
    store.client.delete_experiment(store.experiment_id)
    refuse(settings, "'gone' was deleted", "restore")


def test_a_folder_that_was_moved_is_refused_until_its_old_place_leads_to_it(
    new_store: Callable[[], Path],
) -> None:
    old = new_store().resolve()
    new = old.with_name(f"{old.name} moved")
    check_tracking(TrackingSettings(root=old))
    old.rename(new)
    moved = TrackingSettings(root=new)
    assert open_store(locate(moved), "plait", reading=True)  # losses are in the database
    refuse(moved, f"moved or copied from {old}", f"ln -s '{new}' {old}", "tracking.experiment=NAME")
    assert not old.exists()
    check_tracking(replace(moved, experiment="other"))
    shutil.copytree(new, old)
    refuse(moved, f"moved or copied from {old}")
    shutil.rmtree(old)
    old.symlink_to(new)
    check_tracking(moved)


def test_artifacts_may_lie_where_the_user_wants_them(new_store: Callable[[], Path], tmp_path: Path) -> None:
    settings, large = TrackingSettings(root=new_store()), tmp_path / "large"
    store = open_store(check_tracking(settings), "plait")
    large.mkdir()
    (settings.root / "artifacts").symlink_to(large)
    check_tracking(settings)
    for place in (large, large / "artifacts"):
        store.client.create_experiment(place.name, str(place))
        place.mkdir(exist_ok=True)
        check_tracking(replace(settings, experiment=place.name))


def test_a_disk_that_is_mounted_at_two_places_was_not_moved(
    new_store: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, other = new_store(), new_store()
    check_tracking(TrackingSettings(root=root))
    shutil.copy(root / "mlflow.db", other)
    refuse(TrackingSettings(root=other), "moved or copied from")
    monkeypatch.setattr(os.path, "samestat", lambda *_: True)
    check_tracking(TrackingSettings(root=other))


@pytest.mark.parametrize("name", ["dl%20runs", "my runs?x=1"])
def test_a_folder_that_mlflow_would_read_as_another_is_refused(tmp_path: Path, name: str) -> None:
    refuse(TrackingSettings(root=tmp_path / name), name, "MLflow takes", "Choose a folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pass@host/db", "postgresql://me:***@host/db"),
        ("a=http://u:p@h b=https://u:q@h:1/x", "a=http://u:***@h b=https://u:***@h:1/x"),
        ("'postgresql:///db?password=p&user=u' x", "'postgresql:///db?password=***&user=u' x"),
        ("http://host:5000/@me", "http://host:5000/@me"),
        ("postgresql://me:pa/ss@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:1/2@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:p@ss@host/db", "postgresql://me:***@host/db"),
        ("'a=postgresql://me:pa ss@host/db' b=c@d", "'a=postgresql://me:***@host/db' b=c@d"),
        ("mysql+pymysql://u:p#?/x@h:3/d", "mysql+pymysql://u:***@h:3/d"),
        (shlex.quote("a=http://me:it's@host"), "'a=http://me:***@host'"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("https://token123@host:1/x", "https://***@host:1/x"),
        ("https://token123:@host", "https://***@host"),
        ("http://host:5000/?token=a&x=1 (b)", "http://host:5000/?token=***&x=1 (b)"),
        ("https://host?x=1&ACCESS_TOKEN='a'", "https://host?x=1&ACCESS_TOKEN=***'"),
        ("{'a': 'http://u:p@h','b': 'x@y'}", "{'a': 'http://u:***@h','b': 'x@y'}"),
        ("plait sweep a=http://127.0.0.1:5000 b=c@d", "plait sweep a=http://127.0.0.1:5000 b=c@d"),
        ("sqlite:////data/a:b@c.db", "sqlite:////data/a:b@c.db"),
        ("looked for /home/me/https:/u:p@h/x.jsonl.", "looked for /home/me/https:/***@h/x.jsonl."),
        ("https:/token@host/x HTTPS:/u:p@s/s@h", "https:/***@host/x HTTPS:/***@h"),
        ("http://host/?author=Bob&design=2&sort_keys=1", "http://host/?author=Bob&design=2&sort_keys=1"),
        ("postgresql:///db?user=u&pw=p", "postgresql:///db?user=u&pw=***"),
        ("http://host/?auth=a&sig=b&x=1", "http://host/?auth=***&sig=***&x=1"),
        ("a=http://h:5000/#token (b) https://h/x?y=1#t'", "a=http://h:5000/#*** (b) https://h/x?y=1#***'"),
        ("postgresql://u:p@h/d?options=a@b", "postgresql://u:***@h/d?options=a@b"),
        ("a=postgresql://u:p@h/d,b=http://v:q@i/e", "a=postgresql://u:***@h/d,b=http://v:***@i/e"),
    ],
)
def test_passwords_do_not_show(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["a", "://", "x://u:p ", "'://u:pp ab ' ", "?token", "http://u:'"])
def test_long_texts_are_read_once(part: str) -> None:
    """As in the differences of a repository; going back and forth over them would take longer than the limit,
    and over those of four times this length hours."""
    assert redact(part * (250_000 // len(part)))

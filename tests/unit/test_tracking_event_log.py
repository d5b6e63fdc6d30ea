"""The event log: read back after any cut, adopted by other processes, on a full disk; and the points that are
written when a search is killed again and again."""

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import StorageError
from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import JobAdmitted, JobEvaluated, JobPaused, JobProgress
from plait.core.settings import RunSettings, TrackingSettings
from plait.tracking.event_log import EventLog, free_logs, logs_folder, open_event_log
from plait.tracking.facts import SearchFacts
from plait.tracking.leaderboard import JobRecord, Leaderboard
from plait.tracking.names import DEVICE_SECONDS, TRAIN_LOSS
from plait.tracking.records import (
    Head,
    Line,
    LogFolder,
    LogPoints,
    LogText,
    OpenRun,
    SetStatus,
    SetTags,
    Written,
    decode,
    encode,
)
from plait.tracking.search_run import SearchClock, SearchRun
from plait.tracking.spans import SpanLog
from plait.tracking.tables import SearchTables
from plait.tracking.tracker import Tracker, _Started
from plait.tracking.writer import Request, Writer

pytestmark = pytest.mark.usefixtures("temporary")

HEAD = Head("parent", "search demo", "sqlite:///there")
numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.dictionaries(st.text(), st.text())
lines: st.SearchStrategy[Line] = st.one_of(
    st.builds(
        LogPoints,
        st.text(),
        st.integers(0),
        st.integers(0),
        st.dictionaries(st.text(), numbers),
        st.booleans(),
    ),
    st.builds(SetTags, st.text(), texts),
    st.builds(OpenRun, st.text(), st.integers(0), st.text(), texts, texts, st.integers(0), st.booleans()),
    st.builds(LogText, st.text(), st.text(), st.text()),
    st.builds(LogFolder, st.text(), st.text(), st.text()),
    st.builds(SetStatus, st.text(), st.text(), st.integers(0)),
    st.builds(Written, st.text(), st.dictionaries(st.text(), st.integers(0))),
    st.just(HEAD),
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with closing(open_event_log(tmp_path, HEAD)) as log:
        yield log


def point(run: str, step: int, loss: float = 1.0) -> LogPoints:
    return LogPoints(run, step, 1000 + step, {TRAIN_LOSS: loss})


def steps(log: EventLog) -> list[int]:
    return [item.step for item in log.peek(1000) if isinstance(item, LogPoints)]


def send(log: EventLog, count: int) -> None:
    """The store takes so many records."""
    log.peek(count)
    log.drop()


@given(lines)
def test_a_line_comes_back_as_it_went(line: Line) -> None:
    text = encode(line)
    assert text.index(b"\n") == len(text) - 1
    assert decode(text) == line


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'["points"]', b'["status","a","b",1,2]', b'["what"]', b"\0" * 40, b"7"]
)
def test_text_that_is_not_a_line_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a line of an event log"):
        decode(text)


# ---- one log ---------------------------------------------------------------------------------------------


def test_a_log_cut_anywhere_is_read_up_to_the_cut_and_continues_there(tmp_path: Path) -> None:
    whole = open_event_log(tmp_path, HEAD)
    ends = [whole.path.stat().st_size]
    for step in range(1, 5):
        whole.append(point("a", step))
        ends.append(whole.path.stat().st_size)
    whole.close()
    text = whole.path.read_bytes()
    for cut in range(ends[0], len(text) + 1):
        whole.path.write_bytes(text[:cut])
        again = open_event_log(tmp_path, HEAD)
        there = sum(end <= cut for end in ends[1:])
        assert steps(again) == list(range(1, there + 1))
        assert again.waiting == there
        for step in range(1, 6):
            again.append(point("a", step))
        assert steps(again) == [1, 2, 3, 4, 5]
        again.close()


def test_a_loss_of_power_costs_what_follows_the_first_line_that_it_spoilt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = open_event_log(tmp_path, HEAD)
    for step in range(1, 4):
        log.append(point("a", step))
    log.close()
    text = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join((*text[:2], b"\0" * 30 + b"\n", *text[3:])))
    capsys.readouterr()
    again = open_event_log(tmp_path, HEAD)
    said = capsys.readouterr()
    assert f"{log.path} is damaged from byte {len(text[0] + text[1])} on" in said.out + said.err
    assert "not sent are missing from the store" in said.out + said.err
    assert steps(again) == [1]
    again.close()


def test_a_log_without_its_first_line_begins_again(tmp_path: Path) -> None:
    log = open_event_log(tmp_path, HEAD)
    log.close()
    log.path.write_bytes(encode(HEAD)[:7])
    files = len(list(Path("/dev/fd").iterdir()))
    assert list(free_logs(tmp_path)) == []
    assert len(list(Path("/dev/fd").iterdir())) == files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'["log","parent","search demo","there",1]\n["points","a",1,1,{}]\n', "version 1"),
        (b'["points","a",1,1,{}]\n', "begins with its head"),
        (b"my notes", "different kind"),
    ],
)
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / f"{HEAD.parent_id}-0.jsonl"
    path.write_bytes(text)
    with pytest.raises(StorageError, match=said) as caught:
        open_event_log(tmp_path, HEAD)
    assert str(path) in caught.value.value
    assert said == "different kind" or "not sent are missing from the store" in caught.value.remedy
    assert path.read_bytes() == text


def test_sent_records_are_not_sent_again_and_unsent_ones_are(tmp_path: Path) -> None:
    log = open_event_log(tmp_path, HEAD)
    for step in range(1, 6):
        log.append(point("a", step))
    assert [item.run for item in log.peek(3)] == ["a"] * 3
    log.append(point("a", 6))
    log.drop()
    log.peek(2)  # the process ends before the store has said that it has these
    log.close()
    again = open_event_log(tmp_path, HEAD)
    assert (again.waiting, steps(again)) == (3, [4, 5, 6])
    again.close()


def test_everything_is_sent_again_if_the_count_of_sent_bytes_is_lost(tmp_path: Path) -> None:
    log = open_event_log(tmp_path, HEAD)
    log.append(point("a", 1))
    send(log, 1)
    log.close()
    log.path.with_suffix(".sent").write_bytes(b"12")
    again = open_event_log(tmp_path, HEAD)
    assert steps(again) == [1]
    again.close()


def test_records_are_on_the_disk_before_the_store_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power leaves points in the store of which the log does not know that they are
    written."""
    synced: dict[int, int] = {}
    really = os.fsync

    def noted(file: int) -> None:
        really(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", noted)
    log = open_event_log(tmp_path, HEAD)
    inode = log.path.stat().st_ino
    assert tmp_path.stat().st_ino in synced  # the new file is in its folder
    for step in (1, 2):
        log.append(point("a", step))
        assert synced[inode] < log.path.stat().st_size
        assert steps(log) == list(range(1, step + 1))
        assert synced[inode] == log.path.stat().st_size
    log.text(HEAD.parent, "plan.json", "my plan")
    (text,) = tmp_path.glob("*.plan.json")
    assert text.stat().st_ino not in synced
    log.commit()
    assert text.stat().st_ino in synced
    log.close()


def test_a_text_and_its_name_are_on_the_disk_after_a_commit_that_follows_a_failed_one(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.text(HEAD.parent, "plan.json", "my plan")
    (text,) = tmp_path.glob("*.plan.json")
    synced: list[int] = []

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(StorageError, match="Input/output error"):
            log.commit()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    log.commit()
    inode, folder = text.stat().st_ino, tmp_path.stat().st_ino
    assert synced.index(inode) < synced.index(folder)
    synced.clear()
    log.commit()
    assert synced == []


def test_a_commit_waits_for_the_texts_that_another_thread_commits(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.text(HEAD.parent, "plan.json", "my plan")
    writing, go_on, second = threading.Event(), threading.Event(), threading.Event()

    def slow(_: int) -> None:
        writing.set()
        assert go_on.wait(10)

    def commit_too() -> None:
        log.commit()
        second.set()

    monkeypatch.setattr(os, "fsync", slow)
    threads = [threading.Thread(target=log.commit), threading.Thread(target=commit_too)]
    threads[0].start()
    assert writing.wait(10)
    monkeypatch.setattr(log._log, "commit", lambda: None)  # the lines have a durable end of their own
    threads[1].start()
    assert not second.wait(0.2)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert second.is_set()


def test_records_appended_during_a_sync_are_not_given_yet(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(point("a", 1))
    really = os.fsync
    late = iter([2])

    def slow(file: int) -> None:
        really(file)
        for step in late:
            log.append(point("a", step))

    monkeypatch.setattr(os, "fsync", slow)
    assert steps(log) == [1]
    assert steps(log) == [1, 2]


def test_a_full_disk_is_reported_and_old_content_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_event_log(tmp_path, HEAD)
    log.append(point("a", 1))
    before = log.path.read_bytes()
    really = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, text: really(file, text[: len(text) // 2]))
        with pytest.raises(StorageError, match="No space left on device") as caught:
            log.append(point("a", 2))
    assert caught.value.exit_status == 2
    assert str(log.path) in caught.value.value
    assert "run the same command again" in caught.value.remedy
    assert log.path.read_bytes() == before
    log.append(point("a", 2))
    assert steps(log) == [1, 2]
    log.close()


# ---- several logs ------------------------------------------------------------------------------------------


def test_each_process_has_a_log_of_its_own_and_adopts_that_of_one_that_ended(tmp_path: Path) -> None:
    mine, other = open_event_log(tmp_path, HEAD), open_event_log(tmp_path, HEAD)
    assert mine.path != other.path
    files = len(list(Path("/dev/fd").iterdir()))
    assert list(free_logs(tmp_path)) == []
    assert len(list(Path("/dev/fd").iterdir())) == files
    assert mine.others()
    other.append(point("b", 1))
    send(other, 1)
    other.append(point("b", 2))
    other.points("b", 2, {DEVICE_SECONDS: 3.0}, late=True)
    other.close()
    mine.append(point("a", 1))
    mine.adopt_ended()
    assert not other.path.exists()
    assert (mine.shared, mine.others()) == (True, False)
    found = [(item.run, item.step) for item in mine.peek(9) if isinstance(item, LogPoints)]
    assert found == [("a", 1), ("b", 2), ("b", 2)]
    mine.close()
    mine = open_event_log(tmp_path, HEAD)
    for step in (1, 2, 3):
        mine.append(point("b", step))  # trained again: only the third is new
    mine.points("b", 2, {DEVICE_SECONDS: 3.0}, late=True)  # sent again
    assert steps(mine) == [1, 2, 2, 3]
    mine.points("b", 2, {DEVICE_SECONDS: 4.0}, late=True)  # ended again: training twice costs more
    assert steps(mine) == [1, 2, 2, 3, 2]
    assert mine.device_seconds("b") == 4.0
    assert mine.waiting == 5
    mine.close()


def test_adopting_a_log_whose_points_were_sent_keeps_which_are_written(tmp_path: Path) -> None:
    mine, other = open_event_log(tmp_path, HEAD), open_event_log(tmp_path, HEAD)
    other.points("a", 3, {TRAIN_LOSS: 1.0, DEVICE_SECONDS: 4.0})
    send(other, 1)
    other.close()
    mine.adopt_ended()
    mine.points("a", 3, {TRAIN_LOSS: 1.0, DEVICE_SECONDS: 4.0})
    assert (mine.waiting, mine.last_step("a", TRAIN_LOSS), mine.device_seconds("a")) == (0, 3, 4.0)
    mine.close()


def test_adopting_a_log_whose_points_were_sent_keeps_the_newest_of_the_searchs_run(tmp_path: Path) -> None:
    mine, other = open_event_log(tmp_path, HEAD), open_event_log(tmp_path, HEAD)
    for log, step in ((mine, 2), (other, 3)):
        log.append(point(HEAD.parent, step))
        send(log, 1)
    other.close()
    mine.adopt_ended()
    assert mine.newest == point(HEAD.parent, 3)
    mine.close()  # killed before a point of its own
    later = open_event_log(tmp_path, HEAD)
    assert later.newest == point(HEAD.parent, 3)
    later.close()


def test_what_was_not_sent_is_counted_and_named(log: EventLog) -> None:
    log.append(point("a", 1))
    log.append(point("a", 2))
    said = log.describe_unsent("it is away")
    assert said.startswith("2 records have not been sent to sqlite:///there yet (it is away). They are kept")
    assert str(log.path) in said
    assert " yet. They" in log.describe_unsent()


def test_adopting_a_log_includes_its_texts(tmp_path: Path) -> None:
    mine, other = open_event_log(tmp_path, HEAD), open_event_log(tmp_path, HEAD)
    for path in ("leaderboard.json", "plan.json"):
        other.text(HEAD.parent, path, f"their {path}")
    mine.text(HEAD.parent, "plan.json", "my plan")
    other.close()
    mine.adopt_ended()
    found = {item.path: Path(item.file).read_text() for item in mine.peek(9) if isinstance(item, LogText)}
    assert found == {"plan.json": "my plan", "leaderboard.json": "their leaderboard.json"}
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_logs_of_an_earlier_search_of_the_name_stay_while_they_have_something_unsent(tmp_path: Path) -> None:
    before = [open_event_log(tmp_path, Head(name, "search demo", "there")) for name in ("sent", "unsent")]
    for log in before:
        log.append(point("a", 1))
    send(before[0], 1)
    for log in before:
        log.close()
    mine = open_event_log(tmp_path, HEAD)
    assert sorted(path.stem for path in tmp_path.glob("*.jsonl")) == ["parent-0", "unsent-0"]
    assert (mine.waiting, mine.shared) == (0, False)
    mine.close()


# ---- which points are written ------------------------------------------------------------------------


class Nowhere:
    """A sender of which nothing is heard."""

    def send(self, request: Request) -> None:
        raise ConnectionError(request.run)


class Life:
    """One process after the other trains a job; each may die at any moment."""

    def __init__(self, root: Path, length: int, most: int, evaluations: set[int]) -> None:
        self.root, self.length, self.evaluations = root, length, evaluations
        self.settings = TrackingSettings(root=root, points=most, flush_seconds=3600.0)
        self.checkpoint = 0
        self.clock = 0.0

    def process(self, until: int, saves: set[int], lost: int, *, over: bool = False) -> None:
        """Train from the checkpoint to a step; then die, or bring the job to its end, and lose so many of the
        bytes that were written since the last commit."""
        log = open_event_log(logs_folder(self.root, "demo"), HEAD)
        tracker = started(Tracker(self.settings, clock=self.now), log)
        tracker.start_job(JobSpec("a"), 0)
        tracker.handle(JobAdmitted(JobSpec("a"), self.checkpoint, self.length, "g0"))
        safe = log.path.stat().st_size
        for step in range(self.checkpoint + 1, until + 1):
            tracker.handle(JobProgress("a", step, 3.0 / step, 1.0, 1e-4, step, 0.5 * step, 10.0))
            if step in self.evaluations:
                tracker.handle(JobEvaluated("a", step, 2.0 / step, 10))
            if step in saves:
                tracker.commit()
                self.checkpoint, safe = step, log.path.stat().st_size
        if over:
            seconds = 0.5 * until + 5.0
            tracker.handle(
                JobResult(
                    "a",
                    JobState.FINISHED,
                    until,
                    tokens=until,
                    device_seconds=seconds,
                    completion_seconds=9.0,
                )
            )
        tracker.close(0.0)
        os.truncate(log.path, max(safe, log.path.stat().st_size - lost))

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    def points(self) -> list[tuple[int, str, bool, float]]:
        log = open_event_log(logs_folder(self.root, "demo"), HEAD)
        found = [
            (item.step, key, item.late, value)
            for item in log.peek(10**6)
            if isinstance(item, LogPoints) and item.run == "a"
            for key, value in item.values.items()
        ]
        log.close()
        return sorted(found)


def started(tracker: Tracker, log: EventLog) -> Tracker:
    """The tracker with its search begun, without a store."""
    run = search_run(log, tracker.board)
    tables = SearchTables(log.path.parent, run.write_table)
    spans, facts = SpanLog(log.path.parent, "me"), SearchFacts("demo", RunSettings())
    tracker._started = _Started(facts, log, Writer(Nowhere().send, log, 3600.0), run, tables, spans)
    return tracker


deaths = st.lists(
    st.tuples(st.integers(0, 60), st.sets(st.integers(1, 60)), st.integers(0, 2000), st.booleans()),
    max_size=5,
)


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 30), st.sets(st.integers(1, 60)), deaths)
def test_killed_at_any_moment_every_point_is_written_once(
    length: int, most: int, evaluations: set[int], killed: list[tuple[int, set[int], int, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole, life = (Life(Path(name) / part, length, most, evaluations) for part in ("whole", "killed"))
        whole.process(length, set(), 0, over=True)
        for until, saves, lost, over in killed:
            end = min(until, length)
            life.process(end, saves, lost, over=over and end == length)
        life.process(length, set(), 0, over=True)
        assert life.points() == whole.points()
        losses = {step for step, key, _, _ in whole.points() if key == TRAIN_LOSS}
        stride = -(-length // most)
        due = {step for step in range(1, length + 1) if step % stride == 0 or step in evaluations}
        assert losses == due | {1, length}
        assert (length, DEVICE_SECONDS, True, 0.5 * length + 5.0) in whole.points()


def search_run(log: EventLog, board: Leaderboard, points: int = 100) -> SearchRun:
    """The search's run in a process that resumes the search."""
    clock = SearchClock(lambda: 0.0)
    clock.writes = True
    if log.newest is not None:
        clock.follow(log.newest)
    return SearchRun(log, board, clock, points)


def test_the_searchs_own_curves_continue_after_the_last_point_of_a_killed_process(tmp_path: Path) -> None:
    for _ in range(2):
        log = open_event_log(tmp_path, HEAD)
        run = search_run(log, Leaderboard("minimize", 1), points=4)
        for _ in range(3):
            run.write_point({"group/jobs": 1.0})
        log.close()
    log = open_event_log(tmp_path, HEAD)
    steps = [item.step for item in log.peek(99) if isinstance(item, LogPoints)]
    assert steps == [1, 2, 4]
    assert log.newest is not None
    assert log.newest.step == 4
    log.close()


def test_the_next_writer_of_the_curves_continues_after_unsent_points(
    tmp_path: Path,
) -> None:
    first, second = (open_event_log(tmp_path, HEAD) for _ in range(2))
    runs = [search_run(log, Leaderboard("minimize", 1)) for log in (first, second)]
    runs[1].clock.writes = False
    for _ in range(3):
        for run in runs:
            run.write_point({"group/jobs": 1.0})
    first.close()
    runs[1].clock.writes = True
    runs[1].write_point({"group/jobs": 1.0})
    assert [item.step for item in second.peek(99) if isinstance(item, LogPoints)] == [1, 2, 3, 4]
    second.close()


def test_the_searchs_sums_do_not_fall_where_a_killed_process_is_resumed(tmp_path: Path) -> None:
    for tokens, seconds in (
        (100, 5.000000003),
        (70, 3.5),
        (90, 4.5),
        (120, 6.25),
    ):  # back to a checkpoint, and on
        log = open_event_log(tmp_path, HEAD)
        board = Leaderboard("minimize", 1)
        board.add(JobRecord("a", 0, tokens=tokens, device_seconds=seconds))
        search_run(log, board).write_point({})
        log.close()
    log = open_event_log(tmp_path, HEAD)
    points = [item.values for item in log.peek(99) if isinstance(item, LogPoints)]
    log.close()
    assert [point["train/tokens"] for point in points] == [100, 100, 100, 120]
    assert [point[DEVICE_SECONDS] for point in points] == [*[5.000000003] * 3, 6.25]


def test_the_step_at_which_a_job_pauses_or_is_stopped_is_written(tmp_path: Path) -> None:
    log = open_event_log(tmp_path, HEAD)
    tracker = started(Tracker(TrackingSettings(root=tmp_path, points=5)), log)
    tracker.start_job(JobSpec("a"), 0)
    for first, last in ((1, 7), (8, 33)):
        tracker.handle(JobAdmitted(JobSpec("a"), first - 1, 100, "g0"))
        for step in range(first, last + 1):
            tracker.handle(JobProgress("a", step, 1.0, 1.0, 1e-4, step, 0.5 * step, 10.0))
        if last == 7:
            tracker.handle(JobPaused("a", last, PauseReason.PREEMPTED, last, 4.25))
    tracker.handle(
        JobResult("a", JobState.STOPPED, 33, tokens=33, device_seconds=16.5, completion_seconds=9.0)
    )
    found = [item.step for item in log.peek(99) if isinstance(item, LogPoints) and TRAIN_LOSS in item.values]
    assert found == [1, 7, 20, 33]
    late = [item for item in log.peek(99) if isinstance(item, LogPoints) and item.late]
    assert [(item.step, item.values) for item in late] == [(7, {DEVICE_SECONDS: 4.25})]
    tracker.close(0.0)

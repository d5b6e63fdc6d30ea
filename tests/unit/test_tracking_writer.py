"""The background writer: order, few requests, faults of the store. The store is a recorder here: faults are
what these tests are about."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.tracking import writer as writing
from plait.tracking.event_log import EventLog, open_event_log
from plait.tracking.records import (
    Head,
    LogFolder,
    LogPoints,
    LogText,
    OpenRun,
    Record,
    SetStatus,
    SetTags,
    UseData,
)
from plait.tracking.writer import (
    ATTEMPTS,
    AWAY_ATTEMPTS,
    BATCH,
    SHARE,
    RefusedError,
    Request,
    UpdateRun,
    Writer,
    gather,
)


def point(run: str, step: int) -> LogPoints:
    return LogPoints(run, step, 1000 + step, {"train/loss": float(step)})


class Recorder:
    """A sender that takes what ``verdict`` lets through."""

    def __init__(self, verdict: Callable[[Request], Exception | None] = lambda _: None) -> None:
        self.verdict = verdict
        self.taken: list[Request] = []
        self.attempts = 0
        self.threads: set[int] = set()

    def send(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        self.attempts += 1
        if (error := self.verdict(request)) is not None:
            raise error
        self.taken.append(request)

    def points(self) -> list[LogPoints]:
        return [item for request in self.taken if isinstance(request, UpdateRun) for item in request.points]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = open_event_log(tmp_path, Head("parent", "search", "the store"))
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FIRST_DELAY", 0.001)


@pytest.fixture
def writer(log: EventLog) -> Callable[..., Writer]:
    def make(sender: Recorder, flush_seconds: float = 60.0) -> Writer:
        return Writer(sender.send, log, flush_seconds)

    return make


runs = st.sampled_from("abc")
records = st.lists(
    st.one_of(
        st.builds(point, runs, st.integers(0, 50)),
        st.builds(lambda run, key, value: SetTags(run, {key: value}), runs, st.sampled_from("tu"), st.text()),
        st.builds(LogText, runs, st.sampled_from("fg"), st.sampled_from("xy")),
        st.builds(lambda run, name: LogFolder(run, name, "adapter"), runs, st.sampled_from("fg")),
        st.builds(
            lambda run, status: SetStatus(run, status, 1), runs, st.sampled_from(["FINISHED", "KILLED"])
        ),
        st.builds(lambda run: OpenRun(run, 0, "parent", {}, {"t": "opened"}, 1, run), runs),
        st.builds(lambda run, digest: UseData(run, "rows", digest, "{}", "{}"), runs, st.sampled_from("de")),
    )
)


class Held:
    """What a store holds after records or requests, each carried out as MLflow would."""

    def __init__(self) -> None:
        self.points: dict[str, list[LogPoints]] = {}
        self.latest: dict[tuple[str, str], object] = {}

    def carry_out(self, item: Record | Request) -> None:
        match item:
            case LogPoints():
                self.points.setdefault(item.run, []).append(item)
            case UpdateRun():
                self.points.setdefault(item.run, []).extend(item.points)
                self.latest.update({(item.run, f"tag {key}"): value for key, value in item.tags.items()})
            case SetTags():
                self.latest.update({(item.run, f"tag {key}"): value for key, value in item.tags.items()})
            case OpenRun():
                self.latest[item.run, "status"] = "RUNNING"
                self.latest.update({(item.run, f"tag {key}"): value for key, value in item.tags.items()})
            case SetStatus():
                self.latest[item.run, "status"] = item.status
            case LogText():
                self.latest[item.run, f"text {item.path}"] = item.file
            case LogFolder():
                self.latest[item.run, f"folder {item.path}"] = item.folder
            case UseData():
                self.latest[item.run, f"data {item.digest}"] = item.name

    def content(self) -> object:
        return {run: found for run, found in self.points.items() if found}, self.latest


@given(records)
def test_requests_leave_every_run_as_the_records_would(listed: list[Record]) -> None:
    one, other = Held(), Held()
    for item in listed:
        one.carry_out(item)
    for request in gather(listed):
        other.carry_out(request)
    assert other.content() == one.content()


@given(records)
def test_a_run_takes_few_requests_however_runs_are_mixed(listed: list[Record]) -> None:
    requests = gather(listed)
    opened = [item for item in listed if isinstance(item, OpenRun)]
    updates = [item for item in requests if isinstance(item, UpdateRun)]
    assert len(updates) <= len({item.run for item in listed}) + len(opened)
    texts = [item for item in requests if isinstance(item, LogText)]
    assert requests[len(requests) - len(texts) :] == texts  # the runs that they refer to come first


Make = Callable[..., Writer]


def test_everything_arrives_in_order_from_one_other_thread(writer: Make, log: EventLog) -> None:
    sender = Recorder()
    kept = writer(sender)
    for step in range(BATCH + 7):
        log.append(point("a", step))
    assert kept.flush()
    assert [item.step for item in sender.points()] == list(range(BATCH + 7))
    assert len(sender.threads) == 1
    assert threading.get_ident() not in sender.threads
    assert kept.close()


def test_putting_does_not_wait_for_a_store_that_hangs(writer: Make, log: EventLog) -> None:
    answer = threading.Event()
    sender = Recorder(lambda _: None if answer.wait(30) else TimeoutError())
    kept = writer(sender, flush_seconds=0.0)
    for step in range(3000):
        log.append(point("a", step))  # would hang here for 30 s
    assert log.waiting == 3000
    answer.set()
    assert kept.close()
    assert len(sender.points()) == 3000
    assert log.waiting == 0


def test_a_store_that_answers_again_gets_everything_once_and_in_order(writer: Make, log: EventLog) -> None:
    failures = iter([ConnectionError("down"), None, ConnectionError("down"), None, None, None])
    sender = Recorder(lambda _: next(failures, None))
    kept = writer(sender)
    for run in ("a", "b", "c"):
        log.append(point(run, 1))
        log.append(SetStatus(run, "FINISHED", 1))
    assert kept.flush()
    assert [request.run for request in sender.taken] == ["a", "a", "b", "b", "c", "c"]
    assert kept.close()


def test_unsent_records_are_kept_if_the_store_stays_unavailable(
    writer: Make, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = {0: 60.0, ATTEMPTS: 5.0}  # for one attempt more, which would succeed
    monkeypatch.setattr(Writer, "_pause", lambda each: pauses.get(each._failures, 0.0))
    verdicts = [ConnectionError("refused")] * ATTEMPTS
    sender = Recorder(lambda _: verdicts.pop() if verdicts else None)
    kept = writer(sender)
    for step in range(5):
        log.append(point("a", step))
    assert not kept.flush()
    assert str(kept.error) == "refused"
    assert log.waiting == 5
    assert kept.flush()
    assert [item.step for item in sender.points()] == list(range(5))
    assert kept.close()


def test_a_log_that_cannot_be_read_is_read_again_after_a_pause(
    writer: Make, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = threading.Event(), list[int]()
    monkeypatch.setattr(Writer, "_pause", lambda each: 60.0 if each._failures else 0.001)
    log.append(point("a", 1))
    with monkeypatch.context() as patch:

        def spoilt(most: int) -> list[Record]:
            reads.append(most)
            read.set()
            raise OSError("no such device")

        patch.setattr(log, "peek", spoilt)
        kept = writer(Recorder())
        assert read.wait(30)
        time.sleep(0.05)
        assert len(reads) == 1
    assert kept.flush()
    assert str(kept.error) == "no such device"
    assert kept.close()


def test_closing_without_the_store_ends_the_thread_and_keeps_what_waits(writer: Make, log: EventLog) -> None:
    before = set(threading.enumerate())
    kept = writer(Recorder(lambda _: ConnectionError("refused")))
    log.append(point("a", 1))
    assert kept.close()
    assert set(threading.enumerate()) <= before
    assert log.waiting == 1


def test_a_store_that_hangs_is_given_up_without_progress(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "STALL_SECONDS", 0.01)
    answer = threading.Event()
    sender = Recorder(lambda _: None if answer.wait(30) else TimeoutError())
    kept = Writer(sender.send, log, 0.0)
    log.append(point("a", 1))
    assert not kept.flush()
    answer.set()
    assert kept.close()


def test_a_store_is_unavailable_after_several_attempts_until_it_accepts_something(
    writer: Make, log: EventLog
) -> None:
    verdicts = [ConnectionError("no\nanswer")] * AWAY_ATTEMPTS
    seen: list[str] = []

    def verdict(_: Request) -> Exception | None:
        seen.append(made.away)
        return verdicts.pop() if verdicts else None

    made = writer(Recorder(verdict), flush_seconds=0.001)
    log.append(point("a", 1))
    for _ in range(2):  # it gives up after some attempts
        made.flush()
    assert seen == [""] * AWAY_ATTEMPTS + ["no"]
    assert made.away == ""
    made.close()


def test_refused_records_do_not_block_the_rest_and_are_reported_once(writer: Make, log: EventLog) -> None:
    sender = Recorder(lambda request: RefusedError("b: no such run") if request.run == "b" else None)
    kept = writer(sender)
    for run in ("a", "b", "c"):
        log.append(point(run, 1))
    assert kept.flush()
    assert kept.troubles() == ["1 records were refused; the first: b: no such run"]
    assert kept.troubles() == []
    assert [request.run for request in sender.taken] == ["a", "c"]
    assert kept.close()


def test_waiting_records_are_sent_without_a_flush_before_what_runs_in_between(log: EventLog) -> None:
    arrived, rounds = threading.Event(), queue.SimpleQueue[int]()
    log.append(point("a", 1))
    sender = Recorder(lambda request: arrived.set() if request.run == "b" else None)
    kept = Writer(sender.send, log, 0.01, lambda: rounds.put(log.waiting))
    assert rounds.get(timeout=30) == 0
    log.append(point("b", 1))
    assert arrived.wait(60)
    assert kept.close()


def test_nothing_runs_in_between_while_the_store_does_not_answer(log: EventLog) -> None:
    away, rounds = threading.Event(), queue.SimpleQueue[int]()
    away.set()
    log.append(point("a", 1))
    sender = Recorder(lambda _: ConnectionError() if away.is_set() else None)
    kept = Writer(sender.send, log, 0.0, lambda: rounds.put(log.waiting))
    assert not kept.flush()
    assert rounds.empty()
    away.clear()
    assert rounds.get(timeout=30) == 0
    assert kept.close()


@pytest.mark.parametrize(("seconds", "pause"), [(0.0, 0.5), (0.009, 0.5), (0.1, 5.0), (9.0, 30.0)])
def test_the_pause_follows_the_last_round_within_limits(log: EventLog, seconds: float, pause: float) -> None:
    kept = Writer(Recorder().send, log, 0.5)
    assert kept.close()
    kept._round_seconds = seconds
    assert kept._pause() == pytest.approx(pause)


def test_the_pause_leaves_most_of_the_time_to_others(log: EventLog) -> None:
    """After a round of 10 ms the next one begins half a second later."""
    began: list[float] = []

    def slow(_: Request) -> None:
        began.append(time.monotonic())
        time.sleep(0.01)

    def until(number: int) -> None:
        while len(began) < number or log.waiting:
            time.sleep(0.01)

    log.append(point("a", 1))
    kept = Writer(slow, log, 0.0)
    until(1)
    log.append(point("a", 2))
    until(2)
    assert began[1] - began[0] >= 0.01 / SHARE
    assert kept.close()


def test_what_was_sent_before_is_not_sent_again(log: EventLog, writer: Make) -> None:
    for step in range(3):
        log.append(point("a", step))
    log.peek(2)
    log.drop()
    sender = Recorder()
    kept = writer(sender, flush_seconds=0.01)
    assert kept.flush()
    assert [each.step for each in sender.points()] == [2]
    assert kept.close()


def test_a_flush_after_a_long_silence_has_time_of_its_own(log: EventLog) -> None:
    kept = Writer(Recorder().send, log, 60.0)
    kept._progress -= 3600.0
    log.append(point("a", 1))
    assert kept.flush()
    assert kept.close()


def test_closing_twice_does_nothing_more(writer: Make) -> None:
    kept = writer(Recorder())
    assert kept.close()
    assert kept.close()


def test_an_interrupt_while_the_store_hangs_does_not_wait_for_it(
    writer: Make, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers only when the test is over: whoever waited for it would wait forever."""
    answer = threading.Event()
    kept = writer(Recorder(lambda _: None if answer.wait(30) else TimeoutError()), flush_seconds=0.0)
    log.append(point("a", 1))

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kept, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept.close()
    answer.set()
    assert kept.close()


def test_a_last_word_to_a_store_that_hangs_takes_a_moment_only(writer: Make, log: EventLog) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang(_: Request) -> Exception | None:
        asked.set()
        return None if answer.wait(30) else TimeoutError()

    kept = writer(Recorder(hang), flush_seconds=0.0)
    log.append(point("a", 1))
    assert asked.wait(30)
    assert not kept.close(patience=0.01)
    assert log.waiting == 1
    answer.set()
    assert kept.close()
    assert log.waiting == 0

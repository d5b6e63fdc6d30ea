"""The background writer: order, few requests, faults of the store. The store is a recorder here: faults are
what these tests are about."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import StorageError
from plait.tracking.operations import (
    EndRun,
    LogPoints,
    LogText,
    Operation,
    PointsOfRun,
    Request,
    SetTags,
    gather,
)
from plait.tracking.writer import BATCH, RefusedError, Writer


def point(run: str, step: int) -> LogPoints:
    return LogPoints(run, step, 1000 + step, (("train/loss", float(step)),))


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
        return [item for request in self.taken if isinstance(request, PointsOfRun) for item in request.points]


def writer(sender: Recorder, flush_seconds: float = 60.0) -> Writer:
    return Writer(sender, flush_seconds, "the store", first_delay=0.001)


operations = st.lists(
    st.one_of(
        st.builds(point, st.sampled_from("abc"), st.integers(0, 50)),
        st.builds(lambda run, value: SetTags(run, (("tag", value),)), st.sampled_from("abc"), st.text()),
        st.builds(LogText, st.sampled_from("abc"), st.sampled_from(["x", "y"]), st.text()),
        st.builds(lambda run: EndRun(run, "FINISHED", 1), st.sampled_from("abc")),
    )
)


def expanded(requests: list[Request], run: str) -> list[Operation]:
    flat: list[Operation] = []
    for request in requests:
        if request.run == run:
            flat.extend(request.points if isinstance(request, PointsOfRun) else [request])
    return flat


@given(operations)
def test_gathering_keeps_every_operation_of_a_run_in_order(listed: list[Operation]) -> None:
    requests = gather(listed)
    for run in "abc":
        wanted: list[Operation] = [item for item in listed if item.run == run]
        for at, item in reversed(list(enumerate(wanted))):
            later = wanted[at + 1 :]
            if isinstance(item, LogText) and any(
                isinstance(other, LogText) and other.path == item.path for other in later
            ):
                del wanted[at]
        assert expanded(requests, run) == wanted


@given(st.lists(st.builds(point, st.sampled_from("abc"), st.integers(0, 9))))
def test_points_of_a_run_travel_together_however_runs_are_mixed(listed: list[LogPoints]) -> None:
    assert len(gather(listed)) == len({item.run for item in listed})


def test_everything_arrives_in_order_from_one_other_thread() -> None:
    sender = Recorder()
    kept = writer(sender)
    for step in range(BATCH * 2 + 7):
        kept.put(point("a", step))
    kept.flush()
    assert [item.step for item in sender.points()] == list(range(BATCH * 2 + 7))
    assert len(sender.threads) == 1
    assert threading.get_ident() not in sender.threads
    kept.close()


def test_putting_does_not_wait_for_a_store_that_hangs() -> None:
    answer = threading.Event()
    sender = Recorder(lambda _: None if answer.wait(30) else TimeoutError())
    kept = writer(sender, flush_seconds=0.0)
    for step in range(3000):
        kept.put(point("a", step))  # would hang here for 30 s
    assert kept.waiting == 3000
    answer.set()
    kept.close()
    assert len(sender.points()) == 3000


def test_a_store_that_comes_back_gets_everything_once_and_in_order() -> None:
    failures = iter([ConnectionError("down"), None, ConnectionError("down"), None, None, None])
    sender = Recorder(lambda _: next(failures, None))
    kept = writer(sender)
    for run in ("a", "b", "a", "c"):
        kept.put(point(run, len(run)))
        kept.put(SetTags(run, (("t", "1"),)))
    kept.flush()
    assert [request.run for request in sender.taken] == ["a", "a", "b", "b", "a", "a", "c", "c"]
    kept.close()


def test_a_store_that_stays_away_is_an_error_that_counts_what_waits_and_keeps_it() -> None:
    away = [True]
    sender = Recorder(lambda _: ConnectionError("refused") if away[0] else None)
    kept = writer(sender)
    for step in range(5):
        kept.put(point("a", step))
    with pytest.raises(StorageError, match="5 records \\(5 metric values\\) are not in the store: refused"):
        kept.flush()
    assert kept.waiting == 5
    away[0] = False
    kept.flush()
    assert [item.step for item in sender.points()] == list(range(5))
    kept.close()


def test_closing_without_the_store_is_an_error_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    kept = writer(Recorder(lambda _: ConnectionError("refused")))
    kept.put(point("a", 1))
    with pytest.raises(StorageError, match="refused"):
        kept.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        kept.put(point("a", 2))


def test_what_is_refused_does_not_hold_up_the_rest_and_is_told() -> None:
    sender = Recorder(lambda request: RefusedError("b: no such run") if request.run == "b" else None)
    kept = writer(sender)
    for run in ("a", "b", "c"):
        kept.put(point(run, 1))
    with pytest.raises(StorageError, match="1 records were refused by the store; the first: b: no such run"):
        kept.flush()
    assert [request.run for request in sender.taken] == ["a", "c"]
    kept.flush()  # told once
    kept.close()


def test_a_waiting_record_goes_out_by_itself() -> None:
    arrived = threading.Event()
    sender = Recorder(lambda _: arrived.set())
    kept = writer(sender, flush_seconds=0.01)
    kept.put(LogText("a", "plan.json", "{}"))
    assert arrived.wait(30)
    kept.close()


def test_closing_twice_does_nothing_more() -> None:
    kept = writer(Recorder())
    kept.close()
    kept.close()


def test_an_interrupt_while_the_store_hangs_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers only when the test is over: whoever waited for it would wait for ever."""
    answer = threading.Event()
    kept = writer(Recorder(lambda _: None if answer.wait(30) else TimeoutError()), flush_seconds=0.0)
    kept.put(point("a", 1))

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(kept, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.close()
    answer.set()


def test_a_last_word_to_a_store_that_hangs_takes_a_moment_only() -> None:
    answer = threading.Event()
    kept = writer(Recorder(lambda _: None if answer.wait(30) else TimeoutError()), flush_seconds=0.0)
    kept.put(point("a", 1))
    with pytest.raises(StorageError, match="1 records"):
        kept.close(patience=0.01)
    answer.set()

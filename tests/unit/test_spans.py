"""Spans of processes: recorded without gaps, brought onto one clock, and summed over an iteration."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.messages import GroupStep
from plait.core.spans import ReplicaSpans, ReplicaTime, Span
from plait.distributed.clocks import ClockOffset
from plait.engine.replica_times import on_one_clock, times_between
from plait.engine.span_recorder import Part, SpanRecorder
from plait.tracking.values import group_values

JOB = (("a", 1),)


def spans_of(replica: int, *spans: Span, offset: float = 0.0) -> ReplicaSpans:
    return ReplicaSpans(replica, "host", 1, "cpu", spans, offset)


def test_every_moment_is_in_one_span() -> None:
    clock = count()
    recorder = SpanRecorder(lambda: float(next(clock)))
    with recorder.request():
        with recorder.request():  # a command inside of a process's request
            recorder.lap("microbatch", JOB, tokens=7)
        recorder.add_beside(1.5, JOB, received=12)
        recorder.lap("exchange", JOB)
    with recorder.request():
        pass
    *spans, beside = sorted(recorder.take(), key=lambda span: span.overlapping)
    assert (beside.kind, beside.start, beside.bytes) == ("exchange", 1.5, 12)
    assert [span.kind for span in spans] == ["waiting", "microbatch", "exchange", "waiting", "other"]
    assert all(before.end == after.start for before, after in pairwise(spans))
    assert spans[1] == Span("microbatch", 1.0, 2.0, JOB, tokens=7)
    assert recorder.take() == ()


def test_what_was_asked_for_at_once_shares_the_time_until_it_was_done() -> None:
    now = [0.0]
    recorder = SpanRecorder(lambda: now[0])
    now[0] = 8.0  # of the host: asked in no time, then waited
    recorder.share([Part("microbatch", JOB, 2.0, 7), Part("microbatch", JOB, 1.0, 3), Part("step", JOB, 1.0)])
    found = recorder.take()
    assert [(each.kind, each.seconds, each.tokens) for each in found] == [
        ("microbatch", 4.0, 7),
        ("microbatch", 2.0, 3),
        ("step", 2.0, 0),
    ]
    assert all(before.end == after.start for before, after in pairwise(found))
    recorder.share([])
    now[0] = 9.0
    recorder.share([Part("evaluation", JOB, 0.0), Part("evaluation", JOB, 0.0)])
    assert [each.seconds for each in recorder.take()] == [0.5, 0.5]


@given(
    st.floats(-1e4, 1e4),
    st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=1, max_size=20),
)
def test_an_offset_is_wrong_by_no_more_than_it_says(
    offset: float, trips: list[tuple[float, float, float]]
) -> None:
    clock, now = ClockOffset(), 100.0
    for there, work, back in trips:
        began = now + there
        ended = began + work
        clock.learn(now, began - offset, ended - offset, ended + back)
        now = ended + back
    assert abs(clock.seconds - offset) <= clock.error + 1e-6


def test_an_unmeasured_clock_offset_is_zero() -> None:
    assert (ClockOffset().seconds, ClockOffset().error) == (0.0, 0.0)


def test_an_exchange_is_waiting_until_the_last_takes_part() -> None:
    first = spans_of(0, Span("microbatch", 0, 2), Span("exchange", 2, 6, JOB, bytes=8))
    last = spans_of(1, Span("microbatch", -5, 0), Span("exchange", 0, 1, JOB, bytes=8), offset=5.0)
    one, other = on_one_clock([first, last])
    assert one.spans[1:] == (Span("waiting", 2, 5, JOB), Span("exchange", 5, 6, JOB, bytes=8))
    assert other.spans == (Span("microbatch", 0, 5), Span("exchange", 5, 6, JOB, bytes=8))


def test_exchanges_of_the_same_work_are_matched_in_turn() -> None:
    one = spans_of(0, Span("exchange", 0, 2, JOB), Span("exchange", 2, 4, JOB))
    other = spans_of(1, Span("exchange", 1, 2, JOB), Span("exchange", 3, 4, JOB))
    split, whole = on_one_clock([one, other])
    assert [(span.kind, span.start) for span in split.spans] == [
        ("waiting", 0),
        ("exchange", 1),
        ("waiting", 2),
        ("exchange", 3),
    ]
    assert whole == other


def test_busy_and_waited_cover_an_iteration() -> None:
    one = spans_of(
        0,
        Span("evaluation", 0, 3, JOB, tokens=99),
        Span("waiting", 3, 4),
        Span("microbatch", 4, 6, JOB, tokens=5),
        Span("exchange", 5, 7, JOB, bytes=8, overlapping=True),
        Span("exchange", 6, 7, JOB),
    )
    (time,) = times_between([one], 2.0, 10.0)
    assert (time.busy_seconds, time.waited_seconds) == (pytest.approx(4.0), pytest.approx(4.0))
    assert (time.tokens, time.received_bytes) == (5, 8)


def test_metrics_by_replica_are_those_of_several_alone() -> None:
    times = (ReplicaTime(0, 2.0, 0.5, 70, 8, 1.5, 0.5, 95, 90), ReplicaTime(1, 1.5, 1.0, 50, 8))
    step = GroupStep("g", 1, ("a",), 2, 120, 2.5, None, 64, replicas=times)
    one = group_values(replace(step, replicas=times[:1]))
    assert one.keys() == {"group/jobs", "group/microbatches", "throughput/tokens_per_s", "group/fill"}
    several = group_values(step)
    assert {key: value for key, value in several.items() if key not in one} == {
        "replica/0/busy_seconds": 2.0,
        "replica/0/waited_seconds": 0.5,
        "replica/0/tokens": 70,
        "replica/0/received_bytes": 8,
        "replica/0/predicted_busy_seconds": 1.5,
        "replica/0/predicted_waited_seconds": 0.5,
        "replica/0/waited_share": 0.2,
        "replica/0/predicted_waited_share": 0.25,
        "replica/0/peak_bytes": 95,
        "replica/0/predicted_bytes": 90,
        "replica/1/busy_seconds": 1.5,
        "replica/1/waited_seconds": 1.0,
        "replica/1/tokens": 50,
        "replica/1/received_bytes": 8,
        "replica/1/waited_share": 0.4,
    }


def test_every_metric_of_a_replica_is_documented_with_its_unit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text(encoding="utf-8")
    whole = ReplicaTime(0, 1.0, 1.0, 1, 1, 1.0, 1.0, 1, 1)
    for name in group_values(GroupStep("g", 1, (), 0, 0, 0.0, None, 0, replicas=(whole, whole))):
        if name.startswith("replica/"):
            (row,) = [
                line for line in page.splitlines() if line.startswith(f"| `{name.rpartition('/')[2]}` |")
            ]
            assert row.split("|")[2].strip() in ("seconds", "tokens", "bytes", "share")

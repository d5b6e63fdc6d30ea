"""The simulator on schedules small enough to work out by hand, and what it measures of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.time import MicrobatchShape, StageTime
from plait.simulate.events import (
    OneFOneB,
    Order,
    Pipeline,
    Run,
    SimulationError,
    Work,
    simulate,
)
from plait.simulate.orders import BackwardFirst, GPipe
from plait.simulate.ports import Ports, Way, fair_shares
from plait.simulate.report import measure, most_held
from plait.simulate.timeline import chrome_trace
from plait_bench.lorafusion import imbalance_floor


def work(job: str, step: int, tokens: int = 1) -> Work:
    return Work(((job, step),), MicrobatchShape.of([tokens]), tokens, tokens)


def equal(works: list[Work], stages: int, order: Order, forward: float = 1, backward: float = 2) -> Pipeline:
    times = [StageTime(forward, backward) if item.parts else StageTime(0, 0) for item in works]
    return Pipeline(works, [times] * stages, order)


def most(run: Run, stage: int, weights: Sequence[float]) -> float:
    """The largest sum of weights that the stage of replica 0 holds."""
    spans = [span for span in run.spans if (span.replica, span.stage) == (0, stage)]
    return max(most_held(spans, weights).values())


def test_one_stage_runs_without_idling() -> None:
    pipeline = equal([work("a", 0), work("a", 1), work("b", 0)], 1, OneFOneB([3]))
    metrics, run = measure({0: pipeline})
    assert run.makespan == 9
    assert run.steps == {("a", 0): 3, ("a", 1): 6, ("b", 0): 9}
    assert metrics.mean_completion == (6 + 9) / 2
    assert metrics.bubble.total == 0
    assert metrics.device_seconds == 9


def test_two_stages_by_hand() -> None:
    #  stage 0: F0 F1 .  B0 B0 B1 B1     stage 1: .  F0 B0 B0 F1 B1 B1
    run = simulate({0: equal([work("a", 0), work("a", 0)], 2, OneFOneB([2]))})
    spans = {(s.stage, s.kind, s.work): (s.start, s.end) for s in run.spans}
    assert spans[0, "forward", 1] == (1, 2)
    assert spans[1, "backward", 0] == (2, 4)
    assert spans[1, "forward", 1] == (4, 5)
    assert spans[0, "backward", 0] == (4, 6)
    assert spans[0, "backward", 1] == (7, 9)
    assert run.steps == {("a", 0): 9}


def test_a_step_waits_for_all_replicas() -> None:
    slow = equal([work("a", 0)], 1, OneFOneB([1]), forward=5, backward=5)
    fast = equal([work("a", 0), work("a", 1)], 1, OneFOneB([2]))
    run = simulate({0: slow, 1: fast})
    assert run.steps == {("a", 0): 10, ("a", 1): 13}


def test_messages_take_time_and_do_not_occupy_a_stage() -> None:
    works = [work("a", 0), work("b", 0)]
    pipeline = Pipeline(works, [[StageTime(1, 1)] * 2] * 2, OneFOneB([2]), transfer=[10, 0])
    spans = {(s.stage, s.kind, s.work): s.start for s in simulate({0: pipeline}).spans}
    assert spans[0, "forward", 1] == 1
    assert spans[1, "forward", 0] == 11


def test_a_link_sends_one_message_after_another() -> None:
    works = [work("a", 0), work("b", 0), work("c", 0)]
    pipeline = Pipeline(works, [[StageTime(1, 1)] * 3] * 2, GPipe([3]), transfer=[10] * 3)
    starts = {s.work: s.start for s in simulate({0: pipeline}).spans if (s.stage, s.kind) == (1, "forward")}
    assert starts == {0: 11, 1: 21, 2: 31}


def test_links_send_messages_of_different_sizes() -> None:
    pipeline = Pipeline([work("a", 0)], [[StageTime(1, 1)]] * 3, GPipe([1]), transfer=[10], sizes=[1, 3])
    starts = [(span.stage, span.kind, span.start) for span in simulate({0: pipeline}).spans]
    assert starts == [
        *((0, "forward", 0), (1, "forward", 11), (2, "forward", 42)),  # 10 and 30 between them
        *((2, "backward", 43), (1, "backward", 74), (0, "backward", 85)),
    ]


def test_messages_share_a_port_that_several_stages_have() -> None:
    works = [work("a", 0), work("b", 0), work("c", 0)]
    alone = Pipeline(works, [[StageTime(1, 1)] * 3] * 3, OneFOneB([3]), transfer=[10] * 3)
    begins = []
    for ports in ((), (0, 1, 2), (0, 1, 0)):
        run = simulate({0: replace(alone, ports=ports)})
        begins += [s.start for s in run.spans if (s.stage, s.kind, s.work) == (1, "backward", 0)]
    # the last stage's first backward ends at 24. The second stage's port still receives c from the first,
    # whose last 7 seconds take 14 beside it; a link of its own would not hinder
    assert begins == [34, 41, 41]
    # the first and the third stage are on one device, and what they send on goes through its one port
    four = [work(job, 0) for job in "abcd"]
    shared = Pipeline(four, [[StageTime(1, 1)] * 4] * 4, OneFOneB([4]), transfer=[10] * 4)
    ends = [simulate({0: replace(shared, ports=ports)}).makespan for ports in ((0, 1, 2, 3), (0, 1, 0, 3))]
    assert ends[0] < ends[1]


def ways(*pairs: tuple[int, int]) -> list[Way]:
    return [((0, sender, "sends"), (0, receiver, "receives")) for sender, receiver in pairs]


def test_messages_get_equal_parts_of_a_port_and_what_others_leave() -> None:
    # two leave the first port, one of which arrives at the fourth beside a third one
    assert list(fair_shares(ways((0, 1), (0, 3), (2, 3), (3, 0))).values()) == [0.5, 0.5, 0.5, 1.0]
    # three arrive at the fourth, so a fourth one leaves the first port with two thirds of it
    shares = fair_shares(ways((0, 3), (1, 3), (2, 3), (0, 1)))
    assert list(shares.values()) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_a_short_message_is_not_held_up_by_a_long_one_to_another_port() -> None:
    ports, arrived = Ports(), list[str]()
    to_one, to_two = ways((0, 1), (0, 2))
    ports.send(0, to_one, 10, lambda: arrived.append("long"))
    ports.send(0, to_two, 1, lambda: arrived.append("short"))
    ports.send(0, to_two, 1, lambda: arrived.append("after it"))
    times = []
    while found := ports.next():
        times.append(found[0])
        ports.take(*found)()
    assert arrived == ["short", "after it", "long"]
    assert times == [2, 4, 12]


def test_orders_that_wait_for_each_other_are_refused() -> None:
    # the second batch's forward stands in the list before the backward that its step needs
    pipeline = equal([work("a", 0), work("a", 1)], 2, OneFOneB([2]))
    with pytest.raises(SimulationError, match="never ran"):
        simulate({0: pipeline})


def test_noops_let_the_list_continue() -> None:
    metrics, run = measure({0: equal([work("a", 0), Work(), work("a", 1)], 2, OneFOneB([3]))})
    assert run.makespan == 2 * (1 + 1 + 2 + 2)
    assert (metrics.microbatches, metrics.noops) == (2, 1)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["gpipe", "1f1b", "free"]),
)
def test_every_run_obeys_the_pipeline(sizes: list[int], stages: int, name: str) -> None:
    works = [work(f"j{place % 3}", place // 3, size) for place, size in enumerate(sizes)]
    orders: dict[str, Order] = {
        "gpipe": GPipe([1] * len(works)),
        "1f1b": OneFOneB([1] * len(works)),
        "free": BackwardFirst(),
    }
    seconds = [[StageTime(s + size, 2 * s + size) for size in sizes] for s in range(stages)]
    pipelines = {0: Pipeline(works, seconds, orders[name])}
    metrics, run = measure(pipelines)
    at = {(s.stage, s.kind, s.work): s for s in run.spans}
    assert len(at) == len(run.spans) == 2 * stages * len(works)
    for place in range(len(works)):
        for s in range(stages):
            forward, backward = at[s, "forward", place], at[s, "backward", place]
            assert forward.end - forward.start == seconds[s][place].forward
            assert backward.start >= forward.end
            if s:
                assert forward.start >= at[s - 1, "forward", place].end
                assert at[s - 1, "backward", place].start >= backward.end
        job, step = works[place].parts[0]
        assert run.steps[job, step] == at[0, "backward", place].end
        if step:
            assert at[0, "forward", place].start >= run.steps[job, step - 1]
    for s in range(stages):
        own = sorted((x.start, x.end) for x in run.spans if x.stage == s)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    if name == "1f1b":
        assert all(most(run, s, [1] * len(works)) <= stages - s for s in range(stages))
    parts = metrics.bubble
    assert parts.total == pytest.approx(parts.fill_and_drain + parts.imbalance + parts.raggedness)


def test_idle_time_is_divided_by_cause() -> None:
    equal_stages = measure({0: equal([work("a", 0)] * 4, 2, OneFOneB([4]))})[0].bubble
    assert equal_stages.fill_and_drain == pytest.approx(1 / 5)
    assert equal_stages.imbalance == equal_stages.raggedness == 0
    works = [work(f"j{place}", 0) for place in range(50)]
    slow_last = Pipeline(works, [[StageTime(1, 1)] * 50, [StageTime(2, 2)] * 50], OneFOneB([50]))
    bubble = measure({0: slow_last})[0].bubble
    assert imbalance_floor(slow_last.seconds) == 1 / 4
    assert bubble.total == pytest.approx(1 / 4, abs=0.02)
    assert bubble.imbalance == pytest.approx(1 / 4, abs=0.02)
    uneven = [StageTime(1, 1), StageTime(9, 9)] * 25
    bubble = measure({0: Pipeline(works, [uneven, uneven], OneFOneB([50]))})[0].bubble
    assert bubble.raggedness > 0.2
    assert bubble.imbalance == 0


def test_a_replica_that_waits_for_another_is_imbalance_and_counts_by_its_devices() -> None:
    ten = equal([work(f"a{place}", 0) for place in range(10)], 1, OneFOneB([10]))
    five = equal([work(f"b{place}", 0) for place in range(5)], 1, OneFOneB([5]))
    alike = measure({0: ten, 1: five})[0].bubble
    assert alike.total == alike.imbalance == pytest.approx(1 / 4)
    assert alike.fill_and_drain == alike.raggedness == 0
    wide = measure({0: ten, 1: five}, tp={1: 3})[0].bubble
    assert wide.total == wide.imbalance == pytest.approx(3 / 8)


def test_traffic_padding_memory_and_speed() -> None:
    works = [Work((("a", 0),), MicrobatchShape.of([8, 8]), tokens=12, padded=16), work("b", 0, 20)]
    metrics, run = measure({0: equal(works, 3, OneFOneB([2]))}, hidden_size=10, tp={0: 2})
    assert metrics.communication_bytes == 2 * 2 * (12 + 20) * 10 * 2
    assert metrics.padding_share == pytest.approx(1 - 32 / 36)
    assert metrics.tokens_per_second == 32 / metrics.makespan
    assert metrics.device_seconds == 6 * metrics.makespan
    assert [most(run, stage, [1, 1]) for stage in range(3)] == [2, 2, 1]
    assert [most(run, stage, [12, 20]) for stage in range(3)] == [32, 32, 20]


def test_bytes_are_held_while_a_microbatch_is_in_flight() -> None:
    weights = [10.0, 20.0, 30.0, 40.0]
    run = simulate({0: equal([work(f"j{place}", 0) for place in range(4)], 3, OneFOneB([4]))})
    # three in flight on the first stage, then two, then one
    held = [most_held([span for span in run.spans if span.stage == stage], weights) for stage in range(3)]
    assert held == [
        {0: 60, 1: 90, 2: 90, 3: 90},
        {0: 30, 1: 50, 2: 70, 3: 70},
        {0: 10, 1: 20, 2: 30, 3: 40},
    ]


def test_the_timeline_is_a_chrome_trace() -> None:
    pipelines = {0: equal([work("a", 0), Work(), work("a", 1)], 2, OneFOneB([3]))}
    events = json.loads(chrome_trace(simulate(pipelines), pipelines))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 2 * 3
    assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= complete[0].keys()
    first = next(event for event in complete if event["name"] == "forward 0: a#0")
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (0, 1_000_000, 1, 1)
    assert sum(event["ph"] == "i" for event in events) == 2
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"replica 0", "stage 0", "stage 1"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} == named == {(1, 1), (1, 2)}

"""The benchmark of orders: what it simulates, where its stages wait, and that a wrong case is seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from forked import FORKS

from plait.core.errors import ConfigError
from plait.core.plans import Microbatch, Segment
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait.core.spans import ReplicaSpans, Span
from plait.distributed.stage_worker import _counts
from plait.planner.instructions import Replay
from plait.simulate.lowering import Lowering
from plait.simulate.orders import ORDERS, OrderName, rule
from plait_bench import gloo_processes
from plait_bench.order_cases import MODEL, Case, OrderOptions, Times, case_of, with_collectives
from plait_bench.order_processes import (
    RECEIVED,
    ProcessorClock,
    ProcessorRecorder,
    Setting,
    TimedMessages,
    items,
    spans_of,
)
from plait_bench.pipeline_orders import APART, measured, pipeline_orders, times_of

ASKED = OrderOptions()
EVEN = [Times(0.04, 0.08)] * 4
UNEVEN = [
    Times(0.04, 0.08, 0.01, 0.005, 0.003),
    Times(0.05, 0.07, 0.02, 0.01, 0.001),
    Times(0.03, 0.09, 0.0, 0.001, 0.004),
    Times(0.06, 0.1, 0.0, 0.002, 0.002),
]


@pytest.mark.parametrize("adapters", [1, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_gpipe_waits_as_its_formula_says(stages: int, adapters: int) -> None:
    idle = (stages - 1) / (ASKED.microbatches + stages - 1)
    assert case_of("gpipe", stages, adapters, ASKED).simulated(EVEN[:stages]).waiting == pytest.approx(idle)


def test_more_adapters_fill_the_pipeline_of_plait_and_not_that_of_1f1b() -> None:
    names: tuple[OrderName, ...] = ("plait", "1f1b")
    plait, others = ([case_of(name, 4, n, ASKED).simulated(EVEN).waiting for n in (1, 4)] for name in names)
    assert plait[1] < 0.25 * plait[0]
    assert others[1] == pytest.approx(others[0])


@pytest.mark.parametrize("name", ORDERS)
def test_the_engine_makes_the_lists_that_are_simulated(name: OrderName) -> None:
    case = case_of(name, 3, 2, ASKED)
    order = rule(name, _counts(items(case)))
    assert tuple(map(tuple, Lowering(3).window(case.microbatches, order))) == case.lists


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("adapters", [1, 4])
def test_steps_and_sends_are_simulated_where_they_run(name: OrderName, adapters: int) -> None:
    """A replay of all instructions, written for this test, takes as long."""
    for stages in (2, 3, 4):
        case, times = case_of(name, stages, adapters, ASKED), UNEVEN[:stages]
        spans = replayed(case, times)
        found = measured(case, [spans], [times])
        assert found.makespan == pytest.approx(found.simulated.makespan)
        assert found.waiting == pytest.approx(found.simulated.waiting)
        assert found.replayed_apart == pytest.approx(0.0, abs=1e-6)
        for own, given in zip(times_of(spans), times, strict=True):
            assert astuple(own) == pytest.approx(astuple(given), abs=1e-9)


def test_a_wrong_order_or_time_is_off_by_more_than_is_allowed() -> None:
    case = case_of("plait", 3, 4, ASKED)
    runs, times = [replayed(case, UNEVEN[:3])], [UNEVEN[:3]]
    assert abs(measured(case, runs, times).apart) < 1e-9
    for wrong in ("gpipe", "1f1b"):
        other = case_of(wrong, 3, 4, ASKED)
        assert abs(measured(other, runs, times).apart) > APART
    slower = [replace(UNEVEN[0], backward=1.5 * UNEVEN[0].backward), *UNEVEN[1:3]]
    assert abs(measured(case, runs, [slower]).apart) > APART


def test_what_varies_from_pass_to_pass_is_seen_and_replayed() -> None:
    """Passes that take longer for a while on one stage, then on the other: a mean does not say when. A wrong
    order of the same passes is not explained by their seconds."""
    case = case_of("plait", 2, 4, ASKED)
    spans = replayed(case, EVEN[:2], varied=0.5)
    found = measured(case, [spans], [times_of(spans)])
    assert found.apart > APART
    assert found.replayed_apart == pytest.approx(0.0, abs=1e-6)
    other = case_of("gpipe", 2, 4, ASKED)
    assert abs(measured(other, [spans], [times_of(spans)]).replayed_apart) > APART


def test_each_run_is_simulated_with_its_own_times() -> None:
    """A stage that is slow in one run makes the other wait, and in the next run the other way round: at times
    between them none would wait."""
    case = case_of("plait", 2, 4, ASKED)
    runs_times = [[Times(0.04, 0.08), Times(0.05, 0.1)], [Times(0.05, 0.1), Times(0.04, 0.08)]]
    runs = [replayed(case, times) for times in runs_times]
    found = measured(case, runs, [times_of(run) for run in runs])
    assert found.each_apart == pytest.approx((0.0, 0.0), abs=1e-6)
    assert abs(found.apart) < 1e-6
    between = [Times(0.045, 0.09)] * 2
    assert measured(case, runs, [between] * 2).apart > APART


def test_with_collectives_each_stage_steps_before_it_takes_what_follows() -> None:
    case = case_of("plait", 3, 2, ASKED)
    found = with_collectives(case)
    for number, (plain, own) in enumerate(zip(case.lists, found.lists, strict=True)):
        assert sorted(plain) == sorted(own)
        assert steps(case, number) == steps(found, number)
        assert (plain == own) == (number == 0)
    assert any(
        "without its whole norm" in fault
        for fault in Replay(len(found.lists)).add(found.lists, dict(enumerate(case.microbatches)))
    )


def steps(case: Case, number: int) -> list[object]:
    return [each for each in case.lists[number] if each.kind == "step"]


def test_a_message_brings_the_time_of_its_sender() -> None:
    """Who takes it has waited until then, and taking it takes its time after that."""
    clocks = [ProcessorClock(), ProcessorClock()]
    recorders = [ProcessorRecorder(clock) for clock in clocks]
    here, there = (TimedMessages(2, torch.float32, torch.device("cpu"), each) for each in recorders)
    for clock, recorder in zip(clocks, recorders, strict=True):
        clock.reset()
        recorder.lap("other")
        recorder.take()
    time.sleep(0.05)
    assert clocks[0]() < 0.05  # it slept
    clocks[0].skip(3.0)
    message = here.pack(torch.ones(1, 2), [7.0])
    assert message.nbytes == here.bytes(Microbatch(0, 0, (Segment("a", 1, (0,), (0,), (1,), 1.0),)), 1)
    busy_for(0.02)
    numbers, rows = there.unpack(message, 1)
    assert (numbers, rows.tolist()) == ([7.0], [[1.0, 1.0]])
    waiting, taking = recorders[1].take()
    assert (waiting.kind, taking.kind) == ("waiting", RECEIVED)
    assert 3.0 <= waiting.end < 3.05
    assert 0.02 <= taking.seconds < 0.2
    assert clocks[1]() >= 3.02
    there.unpack(here.pack(None, [7.0]), 1)  # sent before: there is nothing to wait for
    assert recorders[1].take()[0].seconds == 0.0


def busy_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_training_stages_run_the_case_and_its_simulation_is_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes; a wrong order beside the measured one is further off."""
    monkeypatch.setattr(gloo_processes, "get_context", lambda _: FORKS)
    asked = replace(ASKED, work=MODEL, tokens=64)
    model = ModelSettings(kind="tiny", dtype="float32")
    setting = Setting(asked, replace(RunSettings(), model=model, engine=EngineSettings(device="cpu")))
    case, wrong = case_of("plait", 3, 3, asked), case_of("gpipe", 3, 3, asked)
    (_, spans) = spans_of([case, case], setting)
    for own, listed in zip(spans, case.lists, strict=True):
        kinds = {"forward": "microbatch", "backward": "microbatch", "step": "step"}
        ran = [span.kind for span in own.spans if span.kind in ("microbatch", "step")]
        assert ran == [kinds[each.kind] for each in listed if each.kind in kinds]
        assert all(one.end == other.start for one, other in pairwise(own.spans))
    times = times_of(spans)
    right, other = (abs(measured(each, [spans], [times]).apart) for each in (case, wrong))
    assert right < other
    assert other > APART


@pytest.mark.parametrize("wrong", [{"orders": ["zigzag"]}, {"stages": [0]}, {"steps": 0}, {"work": "rest"}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        pipeline_orders(RunSettings(), (), wrong)


def replayed(case: Case, times: Sequence[Times], varied: float = 0.0) -> list[ReplicaSpans]:
    """The spans of stages that take exactly these times, by carrying out all instructions.

    Args:
        varied: share by which eight passes take longer, then eight shorter, in turns other on each stage.
    """
    passes = [0] * case.stages
    clocks, spans = [0.0] * case.stages, [list[Span]() for _ in times]
    left, sent = [list(own) for own in case.lists], dict[tuple[int, str, int, Any], float]()
    while any(left):
        for stage, own in enumerate(left):
            while own:
                each, start = own[0], clocks[stage]
                key = (each.microbatch, each.keys)
                if each.kind.startswith("receive"):
                    way = each.kind.removeprefix("receive_")
                    at = sent.pop((stage, way, *key), None)
                    if at is None:
                        break
                    clocks[stage] = max(start, at)
                    spans[stage].append(Span("waiting", start, clocks[stage]))
                    if times[stage].receive:
                        start, clocks[stage] = clocks[stage], clocks[stage] + times[stage].receive
                        spans[stage].append(Span(RECEIVED, start, clocks[stage]))
                elif each.kind.startswith("send"):
                    way = each.kind.removeprefix("send_")
                    clocks[stage] += times[stage].send
                    sent[stage + (1 if way == "hidden" else -1), way, *key] = clocks[stage]
                    spans[stage].append(Span("other", start, clocks[stage]))
                else:
                    passes[stage] += each.kind != "step"
                    longer = 1 + varied * (-1) ** (passes[stage] // 8 + stage) * (each.kind != "step")
                    clocks[stage] += longer * getattr(times[stage], each.kind)
                    kind: Any = "step" if each.kind == "step" else "microbatch"
                    tokens = ASKED.tokens * (each.kind == "backward")
                    spans[stage].append(Span(kind, start, clocks[stage], tokens=tokens))
                own.pop(0)
    return [ReplicaSpans(stage, "", 0, "cpu", tuple(own)) for stage, own in enumerate(spans)]

"""What two processes say of their time, and what the coordinator makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from laboratory import random_data, random_texts
from processes import ForkedProcess, fleet
from trace_files import overlaps, tracks_of

from plait.core.errors import ProcessError
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.messages import Attach, Event, GroupStep, SpansTaken
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait.core.spans import ProcessState
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.tracking.spans import SpanLog, write_trace

MODEL = ModelSettings(kind="tiny", dtype="float32", seed=3)
ENGINE = EngineSettings(kernels="grouped", capacity=64, threads=1)
AHEAD = 1000.0  # seconds by which the second process's clock is ahead of the first's and the coordinator's
JOB = JobSpec("a", AdapterSpec(2), TrainSpec(steps=2, batch_size=6, eval_every=1), random_texts(1, 5, 25))


def _check_trace(events: Sequence[Event], folder: Path) -> None:
    """The trace has a track for each process, without overlaps, and covers every iteration."""
    with closing(SpanLog(folder, "worker")) as log:
        for event in events:
            if isinstance(event, SpansTaken):
                log.add(event)
    tracks = tracks_of(write_trace(folder) or "")
    assert list(tracks) == [(1, 1), (1, 2), (2, 1), (2, 2)]  # the process's own thread, and the exchange's
    assert [overlaps(spans) for spans in tracks.values()] == [[]] * 4
    for spans in (tracks[1, 1], tracks[2, 1]):
        first, last = spans[0], spans[-1]
        whole = last["ts"] + last["dur"] - first["ts"]
        # No more than rounding, and what an offset that was measured again takes, is in no span.
        assert sum(span["dur"] for span in spans) == pytest.approx(whole, rel=1e-2)


def test_busy_and_waiting_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkedProcess, "ahead", AHEAD)
    settings = RunSettings(model=MODEL, engine=ENGINE)
    with fleet(2, MODEL, ENGINE, tmp_path / "processes") as worker:
        coordinator = Coordinator(worker, DataCatalogue(random_data), settings, folder=tmp_path)
        coordinator.submit(JOB)
        events: list[Event] = []
        while not coordinator.idle:
            events += coordinator.advance()
    steps = [event for event in events if isinstance(event, GroupStep)]
    linears = [each for each in worker.facts.linears if each.name.endswith(JOB.adapter.target_modules)]
    gradient_bytes = 4 * JOB.adapter.rank * sum(each.in_features + each.out_features for each in linears)
    for step in steps:
        assert [each.replica for each in step.replicas] == [0, 1]
        assert sum(each.tokens for each in step.replicas) == step.tokens
        for each in step.replicas:
            assert each.busy_seconds + each.waited_seconds == pytest.approx(step.seconds)
            assert each.received_bytes == gradient_bytes  # of the one other replica
            assert each.busy_seconds > 0
    taken = [event.replicas for event in events if isinstance(event, SpansTaken)]
    for replica in range(2):
        every = [span for each in taken for span in each[replica].spans]
        spans = [span for span in every if not span.overlapping]
        assert {span.work for span in every if span.overlapping} == {(("a", 1),), (("a", 2),)}
        assert {"attach", "microbatch", "exchange", "step", "evaluation"} <= {span.kind for span in spans}
        # Each take has its own offset, which may be wrong by as much as it says.
        error = max(2 * each[replica].error for each in taken)
        assert all(before.end <= after.start + error for before, after in pairwise(spans))
        assert sum(span.kind == "microbatch" for span in spans) >= len(steps)
    _check_trace(events, tmp_path)
    for each in taken:
        assert all(abs(own.offset + own.replica * AHEAD) <= own.error + 1e-9 for own in each)


def test_a_silent_process_is_seen_before_it_counts_as_dead(tmp_path: Path) -> None:
    seen: list[ProcessState] = []
    with fleet(2, MODEL, ENGINE, tmp_path) as worker:
        assert [(each.doing, each.silent) for each in worker.states()] == [("", 0.0)] * 2
        worker.processes.silence = 2.0
        worker.processes.watch = lambda: seen.extend(worker.states())
        os.kill(worker.states()[1].pid, signal.SIGSTOP)
        with pytest.raises(ProcessError, match="process 1"):
            worker.execute(Attach(JOB))
    silent = [each for each in seen if each.replica == 1 and each.silent > 0]
    assert {(each.doing, each.limit) for each in silent[1:]} == {("receiving data", 2.0)}
    assert max(each.silent for each in silent) > 1.0

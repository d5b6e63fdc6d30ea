"""Seconds from a job's submission to its end, over all the processes that trained it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rung_bench import Bench, KilledError, Notes, halving

from plait.core.lifecycle import JobResult
from plait.core.messages import Cursor
from plait.engine.checkpoints import HEADER


@pytest.mark.parametrize("checkpoint_steps", [1, 3])
def test_seconds_of_killed_processes_count_up_to_their_last_checkpoints(
    tmp_path: Path, checkpoint_steps: int
) -> None:
    bench = Bench(
        tmp_path, halving(trials=1, kind="none"), steps=lambda _: 30, checkpoint_steps=checkpoint_steps
    )
    kept, ended = 0.0, []
    for life in (10, 10, 1000):
        ticks = itertools.count(1000.0 * life)  # another machine: its clock stands elsewhere
        began = next(ticks)
        process = replace(bench, alive=life, notes=Notes(), clock=lambda ticks=ticks: next(ticks))
        try:
            process.run()
        except KilledError:
            (state,) = {max(folder.parent.glob("step-*")) for folder in tmp_path.rglob("step-*")}
            seconds = Cursor(**json.loads((state / HEADER).read_text())).completion_seconds
            assert kept < seconds <= kept + next(ticks) - began
            kept = seconds
        ended += process.of(JobResult)
        spent = next(ticks) - began
    (end,) = ended
    assert kept < end.completion_seconds <= kept + spent
    assert end.completion_seconds - kept > spent / 2


def test_a_state_of_an_earlier_release_has_none() -> None:
    assert Cursor(**{"step": 3, "tokens": 5, "device_ns": 7}).completion_seconds == 0

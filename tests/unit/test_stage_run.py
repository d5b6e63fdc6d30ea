"""Schedules run to their end on stages of a toy model, with the weights of each job trained alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from forked import FORKS
from toy_pipeline import (
    RANDOM,
    alone,
    plans_over_processes,
    random_schedule,
    run_in_processes,
    run_interleaved,
    uneven,
)

PROCESSES = 4
HANGS = 120.0  # seconds until processes are taken to wait for each other


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_schedules_end_with_the_weights_of_each_job_alone(part: int) -> None:
    for seed in range(part, 1000, 4):
        batches, stages, windows = random_schedule(seed)
        toys = run_interleaved(windows, stages, random.Random(seed))
        found = {job: [toy.weights[job] for toy in toys] for job in batches}
        assert found == alone(batches, stages), seed


def test_stages_in_processes_never_wait_for_each_other_to_receive(tmp_path: Path) -> None:
    """The first stage sends 40 hidden states before it receives a gradient; the next one answers each."""
    given = [(number, PROCESSES, str(tmp_path), plans_over_processes) for number in range(PROCESSES)]
    processes = [FORKS.Process(target=run_in_processes, args=each) for each in given]
    for each in processes:
        each.start()
    for each in processes:
        each.join(HANGS)
        each.kill()
    assert [each.exitcode for each in processes] == [0] * PROCESSES
    ended = [torch.load(tmp_path / f"weights-{number}", weights_only=True) for number in range(PROCESSES)]
    wanted = [alone(uneven(), 2), alone(uneven(), 3)]
    for seed in range(RANDOM):
        batches, stages, _ = random_schedule(seed)
        wanted.append(alone(batches, stages))
    for each in wanted:
        stages = len(next(iter(each.values())))
        weights = [ended[number].pop(0) for number in range(stages)]
        assert {job: [own[job] for own in weights] for job in each} == each

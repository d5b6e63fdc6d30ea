"""The benchmark of several processes trains alike on both sides, and tells no speed where it does not."""

from __future__ import annotations

import pytest
import torch
from processes import ForkedProcess

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import ClusterSettings, EngineSettings, ModelSettings, RunSettings
from plait.distributed import launch
from plait_bench import replicas as bench
from plait_bench.joint_side import JointRun

SETTINGS = RunSettings(
    model=ModelSettings(kind="tiny", dtype="float32", seed=3),
    engine=EngineSettings(device="cpu", kernels="grouped", capacity=256, threads=1),
    cluster=ClusterSettings(processes=2, join_seconds=240.0),
)
DATA = DataSpec.of("reasoning_gym", task="chain_sum", size=40, validation=0)
JOBS = [
    JobSpec(
        f"job-{rank}", AdapterSpec(rank, target_modules=("q_proj",)), TrainSpec(steps=3, batch_size=3), DATA
    )
    for rank in (2, 4)
]


@pytest.fixture(autouse=True)
def _few_forked_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "start_process", ForkedProcess)


def test_figures_are_reported_if_both_sides_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []  # asked for, but not taken: on cores that are not free they wait for each other
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    report = bench.replicas(SETTINGS, JOBS, {"rounds": 3, "commands": 5, "loss_tolerance": 1e-5})
    figures = {figure.name: figure for figure in report.figures}
    assert figures["tokens/s, 2 processes"].ours > 0
    assert figures["round trip of a command to 2 processes"].ours > 0
    assert 0 <= figures["no replica works"].ours <= figures["waiting, mean of the replicas"].ours < 100
    assert figures["an iteration, 2 processes, from each share"].how == "simulated"
    assert "Losses differ by at most" in report.assumptions[0]
    assert set(threads) == {2}


def test_no_speed_is_reported_if_both_sides_train_differently() -> None:
    one, many = (JointRun(None, 1, {"a": [loss]}) for loss in (2.0, 2.2))  # type: ignore[arg-type]
    with pytest.raises(PlaitError, match=r"losses differ by 0\.1"):
        bench._check({1: one, 2: many}, 0.02)


def test_one_process_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.processes=1"):
        bench.replicas(RunSettings(engine=SETTINGS.engine), JOBS, {})

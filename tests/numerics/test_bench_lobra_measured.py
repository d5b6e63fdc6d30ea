"""LobRA's ways to train several tasks: all run the same samples, within the replicas' capacities."""

from __future__ import annotations

import pytest

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.settings import EngineSettings, ModelSettings, RunSettings
from plait_bench import lobra_measured as bench

SETTINGS = RunSettings(
    model=ModelSettings(kind="tiny", dtype="float32", seed=3),
    engine=EngineSettings(device="cpu", kernels="grouped", threads=1),
)
CAPACITIES = [96, 48, 48]
OPTIONS = {
    "capacities": CAPACITIES,
    "steps": 2,
    "rank": 4,
    "assumption": {"family": "lognormal", "clip": 96},
    "tasks": [
        {"name": "short", "mean": 10, "skewness": 2.0, "batch_size": 6},
        {"name": "long", "mean": 40, "skewness": 1.0, "batch_size": 3},
    ],
}


def test_all_ways_are_measured_next_to_the_simulation() -> None:
    report = bench.measured(SETTINGS, (), OPTIONS)
    figures = {figure.name: figure for figure in report.figures}
    assert len(figures) == 2 * len(bench.WAYS) - 1
    for figure in figures.values():
        assert figure.how == "measured"
        assert figure.ours > 0
        assert isinstance(figure.target, bench.Baseline)
        assert (figure.target.name, figure.target.value > 0) == ("simulated", True)


def test_every_way_runs_every_sample_once_within_the_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = build(bench.Options, OPTIONS, "options")
    machine = bench._prepare(SETTINGS, asked)
    monkeypatch.setattr(machine.worker, "execute", None)  # nothing else runs
    batches = [machine.drawn.batch(task, 1) for task in asked.tasks]
    ways = {name: way(machine, batches) for name, way in bench.WAYS.items()}
    bench._check(ways)
    real = sum(length for batch in batches for length in batch.lengths)
    for name, turns in ways.items():
        assert len(turns) == (2 if "Sequential" in name else 1)
        found = [batch for turn in turns for own in turn for batch in own]
        large = name in (bench.FUSED, "Task-Sequential")
        assert all(batch.tokens <= (96 if large else CAPACITIES[batch.replica]) for batch in found)
        tokens = sum(batch.tokens for batch in found)
        assert tokens == real if name == bench.PLAIT else tokens > real
        labelled = sum(machine.drawn.shape(batch).labelled for batch in found)
        assert labelled == real - sum(len(batch.lengths) for batch in batches)
    with pytest.raises(bench.PlaitError, match="different samples"):
        bench._check(ways | {"less": ways[bench.PLAIT][:0]})


def test_replicas_must_take_the_longest_sample() -> None:
    with pytest.raises(ConfigError, match="clip 96"):
        bench.measured(SETTINGS, (), OPTIONS | {"capacities": [64, 32]})

"""Searches by Plait and by sequential PEFT on a tiny model: same losses, rungs."""

from dataclasses import replace

import pytest

from plait.core.errors import ConfigError, PlaitError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import (
    EngineSettings,
    ModelSettings,
    RunSettings,
    SearchSettings,
    StoppingSettings,
    TrackingSettings,
)
from plait_bench.replay import replay
from plait_bench.search_vs_sequential import (
    Arena,
    SequentialSearch,
    largest_difference,
    search_vs_sequential,
)

DATA = DataSpec.of("reasoning_gym", task="chain_sum", size=24, validation=5)
RULE = StoppingSettings(kind="successive_halving", rungs=(1, 2), cohort=4)
JOBS = [
    JobSpec(f"trial-{2 * i + j:04d}", AdapterSpec(rank=rank), TrainSpec(steps=4, lr=rate, batch_size=2), DATA)
    for i, rank in enumerate((2, 5))
    for j, rate in enumerate((1e-3, 4e-3))
]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    return RunSettings(
        model=ModelSettings(kind="tiny", dtype="float32"),
        engine=EngineSettings(capacity=512, device="cpu"),
        search=SearchSettings(trials=4, parallel=4, stopping=RULE),
        tracking=TrackingSettings(root=tmp_path / "runs"),
    )


def test_both_sides_train_the_same_trials_to_the_same_losses(settings, monkeypatch):
    options = {"seeds": 2, "loss_tolerance": 1e-5, "evaluation_batch": 2}
    results, race = [], Arena.race
    monkeypatch.setattr(Arena, "race", lambda self, seed: results.append(race(self, seed)) or results[-1])
    report = search_vs_sequential(settings, JOBS, options)
    figures = {figure.name: figure for figure in report.figures}
    for result in results:
        # Float32 and the same decisions: the rungs' cohorts went on as replayed PEFT would have let them.
        assert largest_difference(result)[0] < 1e-5
        assert len(result.joint.evaluations) == 4 + 2 + 1
        rungs = replay(result.curves, replace(settings.search, parallel=1))
        assert {(each.job, each.step) for each in rungs.evaluations} == {
            (each.job, each.step) for each in result.joint.evaluations
        }
        assert result.joint.seconds >= result.joint.evaluations[-1].seconds > 0
    assert results[0].curves[0].points != results[1].curves[0].points
    assert figures["Plait: whole search"].ours > 0
    assert figures["Plait: whole search"].how == "measured"
    for name in ("no pruner", "the same rungs"):
        compared = figures[f"whole search, {name}"]
        assert compared.ours == figures["Plait: whole search"].ours
        assert compared.target.value > 0


def test_a_search_whose_sides_disagree_is_not_reported(settings, monkeypatch):
    advance = SequentialSearch.advance

    def other_data(self):
        self._jobs = [replace(job, train=replace(job.train, seed=99)) for job in self._jobs]
        advance(self)

    monkeypatch.setattr(SequentialSearch, "advance", other_data)
    search = replace(settings.search, trials=2, parallel=2, stopping=replace(RULE, cohort=2))
    settings, jobs = replace(settings, search=search), JOBS[:2]
    with pytest.raises(PlaitError, match="losses of Plait and PEFT differ"):
        search_vs_sequential(settings, jobs, {"seeds": 1, "loss_tolerance": 1e-5})


def test_settings_that_cannot_be_compared_are_refused(settings):
    with pytest.raises(ConfigError, match="rungs=None"):
        search_vs_sequential(
            replace(settings, search=replace(settings.search, stopping=StoppingSettings())), JOBS, {}
        )
    with pytest.raises(ConfigError, match="no jobs"):
        search_vs_sequential(settings, [], {})
    with pytest.raises(ConfigError, match=r"engine\.device=cuda"):
        search_vs_sequential(replace(settings, engine=EngineSettings(device="cuda")), JOBS, {})

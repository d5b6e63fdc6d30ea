"""Searches by Plait and by sequential PEFT, and a record of curves, on a tiny model: same losses, rungs."""

import itertools
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
from plait.engine.catalogue import DataCatalogue
from plait_bench.curves import RecordedCurves, read_curves, write_curves
from plait_bench.joint_side import load_joint_side
from plait_bench.listed_search import search_together
from plait_bench.record_curves import record, record_curves
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


def test_a_record_has_every_evaluation_and_a_search_over_it_is_the_real_one(settings, tmp_path):
    path = tmp_path / "curves.json"
    report = record_curves(settings, JOBS, {"path": str(path), "steps": [1, 2, 3]})
    recorded = read_curves(path)
    assert recorded.steps == (1, 2, 3, 4)
    assert recorded.facts["job"]["train.batch_size"] == 2
    for curve in recorded.curves:
        assert curve.points[0].loss > curve.last.loss  # they learn
        assert all(point.evaluation_seconds > 0 for point in curve.points)
    figures = {figure.name: figure for figure in report.figures}
    replayed = replay(recorded.curves, settings.search)
    assert figures["real pruned search: best loss"].ours == pytest.approx(replayed.best, rel=1e-5)
    gap = figures["what it chose, in the full grid: above the best"].ours
    assert gap == pytest.approx(100 * (replayed.best / recorded.best - 1), abs=1e-3)
    with pytest.raises(ConfigError, match=r"steps=\[0\]"):
        record_curves(settings, JOBS, {"path": str(path), "steps": [0]})
    longer = [*JOBS[1:], replace(JOBS[0], train=replace(JOBS[0].train, steps=5))]
    record_curves(settings, longer, {"path": str(path), "steps": [2, 4], "search": False})
    assert {curve.steps for curve in read_curves(path).curves} == {(2, 4), (2, 4, 5)}


def test_a_search_with_rungs_by_accuracy_decides_as_its_replay_says(settings, tmp_path):
    """Answers are generated by the real engine; the replay decides again from the recorded accuracies."""
    rule = replace(RULE, rungs=(2, 4), metric="eval/accuracy")
    search = SearchSettings(
        trials=6, parallel=3, metric="eval/accuracy", direction="maximize", stopping=replace(rule, cohort=6)
    )
    jobs = [
        replace(job, name=f"trial-{at:04d}", train=replace(job.train, lr=rate, steps=6, keep="best_accuracy"))
        for at, (job, rate) in enumerate(itertools.product(JOBS[::2], (1e-2, 3e-2, 1e-1)))
    ]
    side = load_joint_side(settings, jobs)
    answered = DataCatalogue(
        side.data.of,
        generation_limit=lambda _: 4,
        each_evaluation=lambda _: True,
        score=lambda _spec, _rows, texts: [sum(text.encode()) % 97 / 97 for text in texts],
    )
    side = replace(side, data=answered)
    path = tmp_path / "curves.json"
    steps = {job.name: (2, 4, 6) for job in jobs}
    write_curves(RecordedCurves(tuple(record(side, jobs, steps, tmp_path))), path)
    curves = read_curves(path).curves
    accuracies = [[point.accuracy for point in curve.points] for curve in curves]
    assert all(point.evaluation_seconds > 0 for curve in curves for point in curve.points)
    assert len({tuple(each) for each in accuracies}) > 3, "trials that answer alike decide nothing"
    real = search_together(side, jobs, search, tmp_path / "search")
    assert real.ends == replay(curves, search).ends
    assert {step for _, step in real.ends.values()} == {2, 4, 6}
    by_loss = replace(search, stopping=replace(search.stopping, metric="eval/loss"))
    assert replay(curves, by_loss).ends != real.ends, "losses would have decided the same"
    for name, (state, _) in real.ends.items():
        assert state != "finished" or real.finished[name] == pytest.approx(max(accuracies[int(name[-1])]))

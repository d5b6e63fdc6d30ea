"""``train.keep=best`` and ``best_accuracy``: which evaluation is kept, what is said of it, what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from curve_worker import ADAPTER, CurveWorker, lengths_data, load_lengths
from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag

from plait.core.errors import ConfigError
from plait.core.jobs import DataSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult
from plait.core.messages import (
    Event,
    Export,
    Generate,
    JobEvaluated,
    JobGenerated,
    KeepWeights,
    SaveCheckpoint,
)
from plait.core.settings import EngineSettings, PlannerSettings, RunSettings, SearchSettings, StoppingSettings
from plait.core.space import Space
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.search.identity import identify
from plait.search.objective import Observed, check_kept
from plait.tracking.mlflow_store import job_record

CURVE = {2: 3.0, 4: 1.5, 6: 1.5, 8: 2.0}  # of equal ones the first is best
ACCURACY = {2: 0.25, 4: 0.5, 6: 0.75, 8: 0.75}


def job(keep: str, name: str = "a", **train: Any) -> JobSpec:
    spec = TrainSpec(**{"steps": 8, "batch_size": 2, "eval_every": 2, "keep": keep} | train)
    return JobSpec(name, ADAPTER, spec, lengths_data((3, 5, 8, 4)))


def run(
    folder: Path, jobs: list[JobSpec], *, states: dict[str, Path] | None = None, stop: int | None = None
) -> tuple[list[Event], CurveWorker]:
    """To the end, or until so many iterations are done. Answers of jobs that keep the most accurate weights
    are as good as ACCURACY says."""
    worker = CurveWorker(curve=lambda _job, step: CURVE.get(step, 9.0))
    settings = RunSettings(engine=EngineSettings(capacity=64, checkpoint_steps=1), planner=PlannerSettings())
    asked = any(each.train.keep == "best_accuracy" for each in jobs)
    data = DataCatalogue(
        load_lengths,
        generation_limit=lambda _: 4 if asked else None,
        each_evaluation=lambda _: True,
        score=lambda _spec, rows, _texts: [ACCURACY[worker.steps["a"]]] * len(rows),
    )
    made = Coordinator(worker, data, settings, folder=folder)
    for each in jobs:
        made.submit(each, resume_from=(states or {}).get(each.name))
    events: list[Event] = []
    while not made.idle and stop != 0:
        events += made.advance()
        stop = None if stop is None else stop - 1
    return events, worker


def end(events: list[Event], name: str = "a") -> JobResult:
    (found,) = [event for event in events if isinstance(event, JobResult) and event.job == name]
    return found


def test_the_first_of_the_lowest_evaluations_is_kept(tmp_path: Path) -> None:
    events, worker = run(tmp_path, [job("best"), job("last", "b")])
    assert [each.jobs for each in worker.commands if isinstance(each, KeepWeights)] == [("a",), ("a",)]
    exports = {each.job: each.kept_step for each in worker.commands if isinstance(each, Export)}
    assert exports == {"a": 4, "b": None}
    assert (end(events).eval_loss, end(events, "b").eval_loss) == (1.5, 2.0)
    for name in "ab":  # each evaluation is told as it was
        told = {e.step: e.loss for e in events if isinstance(e, JobEvaluated) and e.job == name}
        assert told == CURVE


def test_the_objective_is_that_of_the_adapter(tmp_path: Path) -> None:
    observed = Observed()
    for event in run(tmp_path, [job("best")])[0]:
        observed.handle(event)
    assert observed.value("a", "eval/loss") == 1.5


@pytest.mark.parametrize("killed", [3, 5, 7])
def test_a_resumed_job_knows_its_best(tmp_path: Path, killed: int) -> None:
    _, first = run(tmp_path, [job("best")], stop=killed)
    assert any(isinstance(each, SaveCheckpoint) for each in first.commands)
    events, worker = run(tmp_path, [job("best")], states={"a": tmp_path / "checkpoints" / "a"})
    assert [each.kept_step for each in worker.commands if isinstance(each, Export)] == [4]
    assert end(events).eval_loss == 1.5


@pytest.mark.parametrize("killed", [None, 3, 5, 7, 8])
def test_the_first_of_the_most_accurate_evaluations_is_kept(tmp_path: Path, killed: int | None) -> None:
    """After an interruption too; what is kept is not asked again at the end."""
    first = [] if killed is None else run(tmp_path, [job("best_accuracy")], stop=killed)[0]
    states = {} if killed is None else {"a": tmp_path / "checkpoints" / "a"}
    events, worker = run(tmp_path, [job("best_accuracy")], states=states)
    assert [each.kept_step for each in worker.commands if isinstance(each, Export)] == [6]
    assert all(not each.best for each in worker.commands if isinstance(each, Generate))
    told = {e.step: e.accuracy for e in [*first, *events] if isinstance(e, JobGenerated)}
    assert told == ACCURACY
    assert [e.accuracy for e in events if isinstance(e, JobGenerated)][-1] == 0.75
    assert end(events).eval_loss == CURVE[6]


def test_a_stopped_trial_is_reported_with_its_last_values(tmp_path: Path) -> None:
    worker = CurveWorker(curve=lambda _job, step: CURVE.get(step, 9.0))
    made = Coordinator(worker, DataCatalogue(load_lengths), RunSettings(), folder=tmp_path)
    made.submit(job("best", steps=20, eval_every=4))
    events = [event for _ in range(8) for event in made.advance()]
    made.cancel("a", "by the user")
    assert end([*events, *made.settle()]).eval_loss == 2.0


@pytest.mark.parametrize(
    ("keep", "state", "loss"),
    [
        ("best", "finished", 1.5),
        ("best", "running", 2.0),
        ("last", "finished", 2.0),
        ("best_accuracy", "finished", 1.75),
    ],
)
def test_a_finished_job_is_read_back_with_the_loss_of_its_adapter(keep: str, state: str, loss: float) -> None:
    tags = [RunTag("plait.trial", "0"), RunTag("plait.state", state), RunTag("plait.step", "8")]
    metrics = [Metric("eval/loss", 2.0, 0, 8), Metric("eval/best_loss", 1.5, 0, 8)]
    metrics += [Metric("eval/kept_loss", 1.75, 0, 8)] if keep == "best_accuracy" else []
    data = RunData(metrics, [] if keep == "last" else [Param("train.keep", keep)], tags)
    info = RunInfo("id", "0", "u", "RUNNING", 0, None, "active", run_name="trial-0000")
    assert job_record(Run(info, data)).eval_loss == loss


RUNGS = SearchSettings(stopping=StoppingSettings(kind="successive_halving"))


@pytest.mark.parametrize(
    ("train", "validation", "search", "said"),
    [
        ({"eval_every": 2}, 0, SearchSettings(), "with data.validation=0\n.*\n.*data.validation=0.1"),
        ({}, 4, SearchSettings(), "with train.eval_every=0\n.*\n.*train.eval_every=10"),
        (
            {},
            4,
            replace(RUNGS, stopping=replace(RUNGS.stopping, metric="train/loss")),
            "train.eval_every=0",
        ),
        ({}, 4, RUNGS, None),
        ({"eval_every": 2}, 4, SearchSettings(), None),
        ({"keep": "last"}, 0, SearchSettings(), None),
        (
            {"keep": "best_accuracy", "eval_every": 2},
            4,
            SearchSettings(),
            "_accuracy without answers",
        ),
    ],
)
def test_the_best_of_no_evaluations_is_refused(
    train: Any, validation: int, search: SearchSettings, said: str | None
) -> None:
    asked = JobSpec(
        "a",
        train=TrainSpec(**{"keep": "best"} | train),
        data=DataSpec.of("reasoning_gym", validation=validation, generate=True),
    )
    if said is None:
        check_kept(search, [asked])
    else:
        with pytest.raises(ConfigError, match=f"train.keep=best {said}" if said[0] == "w" else said):
            check_kept(search, [asked])


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.keep='first'\n.*best, best_accuracy, last"):
        TrainSpec(keep="first")  # type: ignore[arg-type]


def test_train_keep_is_part_of_a_searchs_identity() -> None:
    def name(train: TrainSpec) -> str:
        return identify(Space(()), JobSpec("base", train=train), RunSettings()).name

    assert JobSpec("a").parameters()["train.keep"] == "last"
    assert JobSpec("a", train=TrainSpec(keep="best")).parameters()["train.keep"] == "best"
    assert name(TrainSpec()) != name(TrainSpec(keep="best"))

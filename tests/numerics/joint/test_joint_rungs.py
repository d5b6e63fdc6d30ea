"""A whole search with rungs on the real engine: its survivors end where they would have ended alone, and
places that fall free are filled at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optuna
import pytest
import torch
from laboratory import History, Laboratory, Recorder, assert_same, random_data, random_texts
from optuna.trial import TrialState
from rung_bench import Notes
from studies import study_of

from plait.config.overrides import read_request
from plait.core.jobs import AdapterSpec, JobSpec, TrainSpec
from plait.core.messages import Command, JobEvaluated, JobPaused, RunSchedule
from plait.core.plans import GlobalBatch, Microbatch
from plait.core.settings import EngineSettings, RunSettings, SearchSettings, StoppingSettings
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.local_worker import LocalWorker
from plait.engine.steps import DataOrder, training_batch
from plait.models.base import BaseModel
from plait.planner.packing import pack
from plait.search.run import SearchLoop
from plait.search.stopper import make_stopper
from plait.search.trials import Trial

SPACE = read_request(["adapter.rank=interval(1,12)", "train.lr=tag(log,interval(1e-4,1e-1))"], {}, {}).space
TRIALS, PARALLEL, STEPS, CAPACITY = 12, 4, 6, 64


def make_job(trial: Trial) -> JobSpec:
    """Batches of eight short samples: a microbatch takes about nine of them."""
    rank, lr = trial.values["adapter.rank"], trial.values["train.lr"]
    assert isinstance(rank, int)
    assert isinstance(lr, float)
    train = TrainSpec(steps=STEPS, batch_size=8, lr=lr, seed=trial.number)
    adapter = AdapterSpec(rank, 2.0 * rank, dropout=0.1, target_modules=("q_proj", "v_proj"))
    return JobSpec(trial.name, adapter, train, random_texts(7, 3, 12, train=24, validation=4))


@dataclass(frozen=True)
class Searched:
    """What a search left."""

    history: History
    trials: list[optuna.trial.FrozenTrial]
    packed: list[tuple[Microbatch, ...]]  # of every iteration
    laboratory: Laboratory

    def job(self, number: int) -> JobSpec:
        return make_job(Trial(number, self.trials[number].params))


@pytest.fixture(scope="module")
def searched(tiny_model: Callable[[str], BaseModel], tmp_path_factory: pytest.TempPathFactory) -> Searched:
    torch.set_num_threads(1)
    folder, model = tmp_path_factory.mktemp("search"), tiny_model("llama")
    rule = StoppingSettings(kind="successive_halving", rungs=(2, 4), cohort=6)
    search = SearchSettings(trials=TRIALS, parallel=PARALLEL, sampler="random", stopping=rule)
    engine = EngineSettings(kernels="grouped", capacity=CAPACITY)
    settings = RunSettings(engine=engine, search=search)
    storage = optuna.storages.InMemoryStorage()
    source = study_of(SPACE, search, storage, run=settings)
    data, notes, packed = DataCatalogue(random_data), Notes(), []

    def before(_: LocalWorker, command: Command) -> None:
        if isinstance(command, RunSchedule):
            packed.append(command.microbatches)

    recorder = Recorder(LocalWorker(model, data, engine), before=before)
    coordinator = Coordinator(recorder, data, settings, folder=folder)
    stopper = make_stopper(search, {STEPS}, source.rungs)
    result = SearchLoop(source, make_job, coordinator, notes, search, stopper=stopper).run()
    assert result.exit_status == 0
    history = History(notes.events, recorder.start, recorder.end)
    trials = optuna.load_study(study_name=None, storage=storage).get_trials()
    return Searched(history, trials, packed, Laboratory("llama", model, folder))


def test_survivors_of_a_search_with_rungs_end_where_they_would_have_ended_alone(searched: Searched) -> None:
    survivors = [trial.number for trial in searched.trials if trial.state == TrialState.COMPLETE]
    assert len(survivors) == 2
    parked = {event.job for event in searched.history.events if isinstance(event, JobPaused)}
    assert parked & {searched.job(number).name for number in survivors}
    alone = searched.laboratory.solo([searched.job(number) for number in survivors], capacity=CAPACITY)
    history = searched.history
    last = [e for e in history.events if not isinstance(e, JobEvaluated) or e.step == STEPS]
    found = replace(history, events=last)  # alone there are no rungs at which to evaluate
    for number in survivors:
        job = searched.job(number)
        assert_same(found, alone[job.name], [job])


def test_pruned_trials_came_as_far_as_they_would_have_alone(searched: Searched) -> None:
    pruned = [trial.number for trial in searched.trials if trial.state == TrialState.PRUNED][:2]
    for number in pruned:
        job = searched.job(number)
        losses = searched.history.losses(job.name)
        alone = searched.laboratory.undisturbed([job], capacity=CAPACITY).losses(job.name)
        assert len(losses) in (2, 4)
        assert losses == pytest.approx(alone[: len(losses)], rel=1e-5)


def test_freed_capacity_is_used_in_every_iteration_until_the_queue_is_empty(searched: Searched) -> None:
    """Tokens in use, against what first-fit-decreasing could use of the samples of live and queued trials.

    In an iteration every live job gives one global batch, and they share one row of
    microbatches, of which the last is filled as far as it happens to be; of four jobs, each of about one
    microbatch, little fills it. So each iteration of these few jobs is measured without
    its least filled microbatch, on both sides. With that microbatch, for 32 trials at once:
    test_search_stopping.py.
    """
    steps = searched.history.steps
    assert len(steps) == len(searched.packed)
    last_drawn = next(at for at, step in enumerate(steps) if f"trial-{TRIALS - 1:04d}" in step.jobs)
    assert last_drawn > 3
    done: Counter[str] = Counter()
    for step, packed in list(zip(steps, searched.packed, strict=True))[:last_drawn]:
        assert len(step.jobs) == PARALLEL
        queued = [name for name in map("trial-{:04d}".format, range(TRIALS)) if not done[name]]
        wanted = [*step.jobs, *(name for name in queued if name not in step.jobs)]
        could = pack([_batch(searched, name, done[name] + 1) for name in wanted], capacity=CAPACITY, tile=1)
        assert _filled(packed) >= 0.95 * _filled(could)
        done.update(step.jobs)


def _batch(searched: Searched, name: str, step: int) -> GlobalBatch:
    job = searched.job(int(name[6:]))
    train = random_data(job.data).train
    return training_batch(job, DataOrder.of(job.train, len(train)), train, step)


def _filled(microbatches: Any) -> float:
    """Share of the capacity in use, without the least filled microbatch."""
    tokens = sorted(each.tokens for each in microbatches)[1:]
    return sum(tokens) / (len(tokens) * CAPACITY)

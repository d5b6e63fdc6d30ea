"""The search loop, on an engine that is a pure function of its jobs: no model, no clock."""

import math
import os
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from studies import study_of

from plait.config.overrides import read_request
from plait.core.errors import CapacityError, ConfigError, StorageError
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.lifecycle import JobResult, JobState, PauseReason
from plait.core.messages import Event, JobAdmitted, JobEvaluated, JobGenerated, JobProgress, Notice
from plait.core.objectives import Constraint, Objective
from plait.core.settings import SearchSettings, StoppingSettings
from plait.search.objective import METRICS, Observed, check_measured, check_objectives, unusual_directions
from plait.search.results import MOST_REJECTED, SearchEnd, describe_result
from plait.search.run import Interrupts, SearchLoop
from plait.search.trials import Trial

SPACE = read_request(["adapter.rank=interval(1,64)", "train.lr=tag(log,interval(1e-5,1e-1))"], {}, {}).space


def loss_of(job: JobSpec) -> float:
    return abs(math.log10(job.train.lr) + 3) + 1 / job.adapter.rank


@dataclass
class Engine:
    """Trains by arithmetic: losses depend on the job alone, and it takes as many steps as its rank."""

    most: int = 4
    broken: Callable[[JobSpec], str] = lambda _: ""
    refused: Callable[[JobSpec], Exception | None] = lambda _: None
    groups: list[list[str]] = field(default_factory=list)
    resumed: dict[str, Path | None] = field(default_factory=dict)
    _live: dict[str, tuple[JobSpec, int]] = field(default_factory=dict)
    _stopping: bool = False

    def submit(
        self,
        job: JobSpec,
        *,
        resume_from: Path | None = None,
        warm_from: Path | None = None,
        rungs: Collection[int] = (),
        measured: bool = False,
        recorded: float = 0.0,
    ) -> None:
        assert recorded == 0.0
        assert warm_from is None
        assert not rungs
        assert not measured
        if error := self.refused(job):
            raise error
        self._live[job.name] = (job, 0)
        self.resumed[job.name] = resume_from

    def stop(self) -> None:
        self._stopping = True

    def cancel(self, job: str, reason: str, *, state: JobState = JobState.STOPPED) -> None:
        raise AssertionError(f"{job} is {state} without a rule that stops trials: {reason}")

    def pause(self, job: str) -> None:
        raise AssertionError(f"{job} is paused without anybody asking for it")

    def resume(self, job: str, reason: PauseReason = PauseReason.BY_USER) -> None:
        raise AssertionError(f"{job} was never paused: {reason}")

    def settle(self) -> Iterator[Event]:
        return iter(())

    def free_slots(self) -> int:
        return self.most - len(self._live)

    def advance(self) -> Iterator[Event]:
        self.groups.append(list(self._live))
        for name, (job, step) in list(self._live.items()):
            steps = job.adapter.rank
            if self._stopping:
                del self._live[name]
                yield ended(name, "paused", step, "interrupted", checkpoint=Path("state") / name)
                continue
            if step == 0:
                yield JobAdmitted(job, 0, steps, "group-0")
            self._live[name] = (job, step + 1)
            yield JobProgress(
                name, step + 1, loss_of(job) + 1 / (step + 1), 1.0, job.train.lr, 8 * (step + 1), 0.5, 16.0
            )
            if reason := self.broken(job):
                del self._live[name]
                yield ended(name, "failed", step, reason)
            elif step + 1 >= steps:
                del self._live[name]
                yield JobEvaluated(name, step + 1, loss_of(job), 8)
                yield ended(name, "finished", step + 1, "budget spent", loss_of(job))


def ended(name: str, state: str, step: int, reason: str, loss: float | None = None, **more: Any) -> JobResult:
    return JobResult(name, JobState(state), step, reason, loss, 8 * step, 0.5, 1.0, **more)


@dataclass
class Notes:
    """Keeps what is reported to it."""

    started: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    judged: list[tuple[str, str, float | None, str]] = field(default_factory=list)
    scores: dict[str, tuple[tuple[float, ...], bool]] = field(default_factory=dict)

    def start_job(self, job: JobSpec, trial: int, outside: str = "") -> float:
        assert job.name == f"trial-{trial:04d}"
        assert not outside
        self.started.append(job.name)
        return 0.0

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, JobResult) and event.state.ended:
            self.judged.append((event.job, event.state, event.objective, event.reason))
            self.scores[event.job] = (event.values[1:], event.feasible)

    def lose(self, job: str) -> None:
        raise AssertionError(job)

    def commit(self) -> None:
        pass


def make_job(trial: Trial) -> JobSpec:
    rank, lr = trial.values["adapter.rank"], trial.values["train.lr"]
    assert isinstance(rank, int)
    assert isinstance(lr, float)
    return JobSpec(trial.name, AdapterSpec(rank=rank), TrainSpec(lr=lr))


@dataclass
class Bench:
    """A search with its study, engine and notes."""

    search: SearchSettings = field(
        default_factory=lambda: SearchSettings(trials=12, parallel=4, sampler="random")
    )
    engine: Engine = field(default_factory=Engine)
    notes: Notes = field(default_factory=Notes)
    storage: optuna.storages.BaseStorage = field(default_factory=optuna.storages.InMemoryStorage)
    make_job: Callable[[Trial], JobSpec] = make_job
    stop: Callable[[], bool] = lambda: False

    def run(self) -> SearchEnd:
        source = study_of(SPACE, self.search, self.storage)
        return SearchLoop(source, self.make_job, self.engine, self.notes, self.search, self.stop).run()

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return optuna.load_study(study_name=None, storage=self.storage).get_trials()


def test_every_trial_runs_once_and_its_value_is_in_the_study() -> None:
    bench = Bench()
    result = bench.run()
    assert result.exit_status == 0
    assert bench.notes.started == [f"trial-{number:04d}" for number in range(12)]
    for item in bench.trials:
        job = make_job(Trial(item.number, item.params))
        assert item.state == TrialState.COMPLETE
        assert item.value == loss_of(job)
        assert item.intermediate_values == {job.adapter.rank: loss_of(job)}
        assert sum(job.name in names for names in bench.engine.groups) == job.adapter.rank
    best, *_ = result.front((Objective("eval/loss"),))
    assert best.objective == min(item.value for item in bench.trials if item.value is not None)


@pytest.mark.parametrize(("parallel", "most", "crowd"), [(4, 2, 2), (2, 4, 2), (1, 4, 1), (8, 8, 8)])
def test_as_many_trials_train_at_once_as_there_are_slots(parallel: int, most: int, crowd: int) -> None:
    bench = Bench(replace(Bench().search, parallel=parallel), Engine(most=most))
    bench.run()
    assert max(map(len, bench.engine.groups)) == crowd


def test_a_free_slot_is_filled_at_the_next_iteration() -> None:
    """While trials are left, the group is never smaller than the places allow."""
    bench = Bench()
    bench.run()
    groups = bench.engine.groups
    last_joins = next(number for number, names in enumerate(groups) if "trial-0011" in names)
    assert all(len(names) == 4 for names in groups[: last_joins + 1])


@given(st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=10)
def test_random_search_gives_the_same_result_however_many_train_at_once(parallel: int, most: int) -> None:
    alone = Bench(replace(Bench().search, parallel=1))
    together = Bench(replace(Bench().search, parallel=parallel), Engine(most=most))
    assert {(item.trial, item.objective) for item in alone.run().finished} == {
        (item.trial, item.objective) for item in together.run().finished
    }


def test_a_failed_job_is_reported_as_failed_and_the_others_continue() -> None:
    bench = Bench(engine=Engine(broken=lambda job: "loss is nan at step 2" if job.adapter.rank > 32 else ""))
    result = bench.run()
    failed = [item for item in bench.trials if item.state == TrialState.FAIL]
    assert 0 < len(failed) < 12
    assert result.exit_status == 3
    assert result.count(JobState.FAILED) == len(failed)
    for item in bench.trials:
        if item.params["adapter.rank"] > 32:
            assert item.value is None
            assert item.user_attrs["plait.reason"] == "loss is nan at step 2"
        else:
            assert item.value == loss_of(make_job(Trial(item.number, item.params)))
    assert {state for _, state, *_ in bench.notes.judged} == {"finished", "failed"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_objective_that_is_not_finite_is_a_failure(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "loss_of", lambda _: value)
    bench = Bench(replace(Bench().search, trials=2))
    assert bench.run().exit_status == 3
    assert [item.state for item in bench.trials] == [TrialState.FAIL] * 2
    assert bench.notes.judged[0][1:] == ("failed", None, f"eval/loss is {value}")


def test_a_job_that_cannot_be_made_or_taken_fails_alone() -> None:
    def refuse(job: JobSpec) -> Exception | None:
        return CapacityError("too large") if job.name == "trial-0003" else None

    def make(trial: Trial) -> JobSpec:
        if trial.number == 5:
            raise ConfigError("adapter.rank=0", "too small")
        return make_job(trial)

    bench = Bench(engine=Engine(refused=refuse), make_job=make)
    assert bench.run().count(JobState.FAILED) == 2
    states = [item.state for item in bench.trials]
    assert [number for number, state in enumerate(states) if state == TrialState.FAIL] == [3, 5]
    assert "trial-0005" not in bench.notes.started
    assert Notice("trial-0005 failed: adapter.rank=0; too small") in bench.notes.events
    assert ("trial-0003", "failed", None, "too large") in bench.notes.judged


def test_a_full_disk_ends_the_search() -> None:
    def make(_: Trial) -> JobSpec:
        raise StorageError("no space left")

    with pytest.raises(StorageError):
        Bench(make_job=make).run()


@pytest.mark.parametrize(("rate", "failures"), [(0.0, 1), (0.25, 4), (1.0, 12)])
def test_too_many_failures_end_the_search(rate: float, failures: int) -> None:
    search = replace(Bench().search, max_failure_rate=rate, parallel=1)
    bench = Bench(search, Engine(broken=lambda _: "broken"))
    result = bench.run()
    assert result.count(JobState.FAILED) == failures
    assert len(bench.trials) == failures
    gave_up = f"{failures} of 12 trials failed, more than search.max_failure_rate={rate:g} allows"
    assert (result.ended_by, result.why) == (("failing", gave_up) if failures < 12 else ("", ""))


@pytest.mark.parametrize("failed", ["keep", "drop"])
def test_a_search_that_gave_up_stays_so(failed: str) -> None:
    search = replace(Bench().search, trials=4, max_failure_rate=0.1, parallel=1, failed=failed)
    bench = Bench(search, Engine(broken=lambda _: "broken"))
    first = bench.run()
    again = replace(bench, engine=Engine(broken=lambda _: "broken"), notes=Notes()).run()
    assert (again.ended_by, again.why) == (first.ended_by, first.why)
    assert first.ended_by == "failing"
    assert len(bench.trials) == 1


def test_a_search_that_drew_all_its_trials_is_finished_however_many_failed() -> None:
    search = replace(Bench().search, max_failure_rate=0.0, parallel=12)
    result = Bench(search, Engine(most=12, broken=lambda _: "broken")).run()
    assert (result.count(JobState.FAILED), result.ended_by) == (12, "")


def test_a_stopped_search_saves_every_job_and_resumes_later() -> None:
    bench = Bench()
    polls = iter([False] * 5)
    bench.stop = lambda: next(polls, True)
    first = bench.run()
    assert first.interrupted
    assert first.exit_status == 130
    running = [item for item in bench.trials if item.state == TrialState.RUNNING]
    assert len(running) == 4
    for item in running:
        assert item.user_attrs["plait.checkpoint"] == str(
            (Path("state") / f"trial-{item.number:04d}").absolute()
        )
    assert not {name for name, *_ in bench.notes.judged} & {f"trial-{item.number:04d}" for item in running}

    again = Bench(storage=bench.storage)
    assert again.run().exit_status == 0
    assert again.notes.started[:4] == [f"trial-{item.number:04d}" for item in running]
    undisturbed = Bench()
    undisturbed.run()
    assert [(item.params, item.value, item.state) for item in again.trials] == [
        (item.params, item.value, item.state) for item in undisturbed.trials
    ]


def test_a_job_stopped_from_outside_is_stopped() -> None:
    class Stopped(Engine):
        def advance(self) -> Iterator[Event]:
            for event in super().advance():
                yield (
                    replace(event, state=JobState.STOPPED, reason="asked to")
                    if isinstance(event, JobResult)
                    else event
                )

    bench = Bench(replace(Bench().search, trials=2), Stopped())
    assert bench.run().exit_status == 0
    assert [item.state for item in bench.trials] == [TrialState.PRUNED] * 2
    assert {state for _, state, *_ in bench.notes.judged} == {"stopped"}
    assert {item.user_attrs["plait.state"] for item in bench.trials} == {"stopped"}


def test_two_objectives_and_a_constraint() -> None:
    """Values are in the order of the objectives; what breaks a measured constraint is complete, never on the
    front; what breaks one on its settings is not trained, and another is suggested in its place."""
    search = replace(
        Bench().search,
        metric=("adapter.rank", "eval/loss", "cost/device_seconds"),
        direction=("minimize", "minimize", "maximize"),
        constraints={"train/tokens": "<= 320", "train.lr": ">= 1e-4"},
        trials=16,
        sampler="tpe",
    )
    bench = Bench(search)
    front = bench.run().front(search.objectives)
    kept = [item for item in bench.trials if item.state == TrialState.COMPLETE]
    assert len(kept) == 16
    assert sum(item.params["train.lr"] >= 1e-4 for item in bench.trials) == 16
    broken = 0
    for item in kept:
        rank, lr = item.params["adapter.rank"], item.params["train.lr"]
        assert item.values == [rank, pytest.approx(abs(math.log10(lr) + 3) + 1 / rank), 0.5]
        assert item.constraints == {"train/tokens <= 320": 8 * rank - 320, "train.lr >= 0.0001": 1e-4 - lr}
        feasible = rank <= 40
        assert bench.notes.scores[f"trial-{item.number:04d}"] == (tuple(item.values[1:]), feasible)
        assert ("violates" in item.user_attrs["plait.reason"]) == (not feasible)
        broken += not feasible
    assert 0 < broken < 16
    best = optuna.load_study(study_name=None, storage=bench.storage).best_trials
    assert sorted(item.trial for item in front) == [item.number for item in best]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_settings_that_break_a_constraint_are_not_trained_and_use_up_no_budget(sampler: str) -> None:
    bench = Bench(replace(Bench().search, constraints={"adapter.rank": "<= 32"}, sampler=sampler))
    result = bench.run()
    rejected = [item for item in bench.trials if item.params["adapter.rank"] > 32]
    assert len(rejected) == result.count(JobState.INFEASIBLE) > 0
    assert len(bench.trials) == 12 + len(rejected)
    trained = {name for names in bench.engine.groups for name in names}
    for item in bench.trials:
        name, rank = f"trial-{item.number:04d}", item.params["adapter.rank"]
        assert item.constraints == {"adapter.rank <= 32": rank - 32}  # which the sampler learns from
        assert (name in trained) == (rank <= 32)
        if rank > 32:
            assert item.state == TrialState.PRUNED
            assert item.user_attrs["plait.state"] == "infeasible"
            assert (name, "infeasible", None, "violates adapter.rank <= 32") in bench.notes.judged
    again = Bench(bench.search, storage=bench.storage)
    assert again.run().finished == result.finished
    assert not again.engine.groups


def test_an_infeasible_point_added_by_the_user_is_not_replaced() -> None:
    """It comes on top of the budget, so that nothing is suggested in its place."""
    bench = Bench(replace(Bench().search, trials=2, constraints={"adapter.rank": "<= 63"}))
    study_of(SPACE, bench.search, bench.storage).enqueue({"adapter.rank": 64})
    result = bench.run()
    assert (len(result.finished), result.count(JobState.INFEASIBLE)) == (3, 1)


def test_a_search_whose_suggestions_are_all_infeasible_ends_and_says_so() -> None:
    def make(trial: Trial) -> JobSpec:
        return JobSpec(trial.name, AdapterSpec(rank=64))

    bench = Bench(replace(Bench().search, constraints={"adapter.rank": "<= 32"}), make_job=make)
    result = bench.run()
    assert len(bench.trials) == result.count(JobState.INFEASIBLE) == MOST_REJECTED
    assert bench.engine.groups == []
    assert result.why == "the last 100 suggestions all break a constraint"
    said = describe_result(result, bench.search, "s", "", exhausted=False)[0]
    assert said.endswith(f": 100 trials, 0 failed, 100 infeasible. No more are suggested: {result.why}.")
    assert len(replace(bench, notes=Notes()).run().finished) == MOST_REJECTED


def test_a_constraint_that_nothing_in_the_space_keeps_is_refused() -> None:
    jobs = [JobSpec(f"rank {rank}", AdapterSpec(rank=rank)) for rank in (4, 32)]
    with pytest.raises(ConfigError, match=r"adapter\.rank <= 2") as caught:
        check_objectives(SearchSettings(constraints={"adapter.rank": "<= 2"}), jobs)
    assert caught.value.rule == "No trial can satisfy it: adapter.rank is between 4 and 32."
    check_objectives(SearchSettings(constraints={"adapter.rank": "<= 4", "eval/loss": "<= 2"}), jobs)


def test_a_lower_limit_on_a_growing_metric_is_not_checked_at_rungs() -> None:
    seen = Observed()
    seen.handle(JobProgress("a", 1, 3.0, 1.0, 1e-3, 100, 50.0, 1.0))
    limits = {
        "train/tokens": (">= 200", False),
        "train/loss": ("<= 2", True),
        "cost/device_seconds": ("<= 40", True),
        "eval/loss": ("<= 2", False),  # not measured yet
    }
    for metric, (text, broken) in limits.items():
        assert seen.violates("a", [Constraint.read(metric, text)]) == broken


def test_a_constraint_that_was_not_measured_is_a_failure() -> None:
    bench = Bench(replace(Bench().search, trials=1, constraints={"eval/accuracy": ">= 0.5"}))
    bench.run()
    assert bench.notes.judged == [("trial-0000", "failed", None, "eval/accuracy was not measured")]


def test_the_best_trial_follows_the_direction_and_ties_go_to_the_first() -> None:
    values = [2.0, 1.0, None, 1.0, 3.0, 3.0]
    finished = tuple(
        JobResult(
            "",
            JobState.FINISHED if value else JobState.FAILED,
            values=(value,) if value else (),
            trial=number,
        )
        for number, value in enumerate(values)
    )
    result = SearchEnd(finished)
    for direction, trial in (("minimize", 1), ("maximize", 4)):
        assert result.front((Objective("eval/loss", direction),))[0].trial == trial
    assert SearchEnd(()).front((Objective("eval/loss"),)) == []


# ---- objective -----------------------------------------------------------------------------------------


def test_the_last_value_of_each_metric_counts() -> None:
    seen = Observed()
    for step in (1, 2):
        seen.handle(JobProgress("a", step, 10.0 / step, 3.0 / step, 1e-3, 100 * step, 0.1, 50.0 * step))
        seen.handle(JobEvaluated("a", step, 20.0 / step, 5))
        seen.handle(JobGenerated("a", step, 0.25 * step))
    seen.handle(JobResult("a", JobState.FINISHED, 2, "", 9.0, 222, 0.75, 4.0, None))
    expected = {
        "eval/loss": 9.0,
        "eval/accuracy": 0.5,
        "train/loss": 5.0,
        "train/grad_norm": 1.5,
        "train/tokens": 222.0,
        "throughput/tokens_per_s": 100.0,
        "cost/device_seconds": 0.75,
        "job/completion_seconds": 4.0,
    }
    assert {metric: seen.value("a", metric) for metric in METRICS} == expected
    seen.handle(JobResult("a", JobState.FINISHED, eval_loss=8.0))  # it trained elsewhere
    assert {metric: seen.value("a", metric) for metric in METRICS} == expected | {"eval/loss": 8.0}
    assert seen.value("b", "eval/loss") is None


def test_a_metric_that_was_not_measured_is_a_failure() -> None:
    bench = Bench(replace(Bench().search, trials=1, metric="eval/accuracy"))
    bench.run()
    assert bench.notes.judged == [("trial-0000", "failed", None, "eval/accuracy was not measured")]


def test_a_metric_that_does_not_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        check_objectives(SearchSettings(metric="loss"), [JobSpec("a")])
    assert "eval/loss" in caught.value.rule
    assert "adapter.rank" in caught.value.remedy


# ---- Ctrl-C ----------------------------------------------------------------------------------------------


def test_the_first_interrupt_is_noted_and_the_second_ends_at_once() -> None:
    said = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda: said.append("ending")) as interrupts:
        assert not interrupts.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested
        assert said == ["ending"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """What these tests may have been started to ignore (nohup) is not ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_that_a_scheduler_or_a_closed_terminal_asks_for_is_orderly_too(
    number: signal.Signals,
) -> None:
    said = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(each) for each in numbers]
    with Interrupts(lambda: said.append("ending")) as interrupts:
        os.kill(os.getpid(), number)
        assert interrupts.requested
        os.kill(os.getpid(), signal.SIGHUP)  # a terminal that is closed sends several
        assert said == ["ending"]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the second ends at once"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(each) for each in numbers] == before


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(lambda: None) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("metric", "direction", "said"),
    [
        (
            "eval/accuracy",
            "minimize",
            ["The lowest eval/accuracy", "maximize would prefer the highest"],
        ),
        ("eval/loss", "maximize", ["highest eval/loss", "minimize would prefer the lowest eval/loss"]),
        (("eval/loss", "eval/accuracy"), "minimize", ["lowest eval/accuracy", "maximize"]),
        (("eval/loss", "eval/accuracy"), ("minimize", "maximize"), []),
        (("adapter.rank", "eval/loss"), ("maximize", "minimize"), []),
        (("eval/loss", "eval/accuracy", "throughput/tokens_per_s"), None, []),
    ],
)
def test_a_direction_by_which_the_worst_would_be_best_is_said(
    metric: Any, direction: Any, said: list[str]
) -> None:
    lines = unusual_directions(SearchSettings(metric=metric, direction=direction))
    assert len(lines) == bool(said)
    assert all(part in lines[0] for part in said)


@pytest.mark.parametrize(
    ("metric", "options", "said"),
    [
        ("eval/loss", {"validation": 0}, "needs validation rows"),
        ("eval/accuracy", {"validation": 0, "generate": True}, "needs validation rows"),
        ("eval/accuracy", {}, "data.generate=true"),
    ],
)
def test_a_metric_that_the_data_does_not_give_is_refused(metric: str, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_measured(SearchSettings(metric=metric), [DataSpec.of("reasoning_gym", **options)])


def test_a_dead_worker_is_announced_before_its_trial_resumes(tmp_path: Path) -> None:
    search = SearchSettings(name="s", trials=2, parallel=1, sampler="random")
    storage = optuna.storages.InMemoryStorage()
    first, second = (study_of(SPACE, search, storage, folder=lambda _: tmp_path) for _ in range(2))
    assert first.ask() is not None
    assert second.claims.to_resume() == 0
    first.close()  # lets go of its lock, as if it had died
    notes = Notes()

    def say_dead() -> None:
        for worker in second.claims.dead_workers():
            notes.handle(Notice(worker.describe()))

    SearchLoop(second, make_job, Engine(), notes, search, say_dead=say_dead).run()
    second.close()
    said = [
        each.text if isinstance(each, Notice) else each.job.name
        for each in notes.events
        if isinstance(each, Notice | JobAdmitted)
    ]
    assert "is dead: its trial 0 (from step 0) resumes when a slot is free" in said[0]
    assert said[1:] == ["trial-0000", "trial-0001"]


def test_a_trial_whose_worker_dies_just_after_none_was_left_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.search.ownership.POLL_SECONDS", 0.0)
    search = SearchSettings(name="s", trials=1, parallel=1, sampler="random")
    storage = optuna.storages.InMemoryStorage()
    first, second = (study_of(SPACE, search, storage, folder=lambda _: tmp_path) for _ in range(2))
    assert first.ask() is not None
    ask = second.ask

    def then_dead(**given: Any) -> Trial | None:
        trial = ask(**given)
        first.close()  # lets go of its lock, as if it had died
        return trial

    monkeypatch.setattr(second, "ask", then_dead)
    end = SearchLoop(second, make_job, Engine(), Notes(), search).run()
    second.close()
    assert [each.trial for each in end.finished] == [0]


def test_a_rung_metric_that_the_data_does_not_give_is_refused() -> None:
    search = SearchSettings(metric="train/loss", stopping=StoppingSettings(kind="median", metric="eval/loss"))
    with pytest.raises(ConfigError, match="eval/loss"):
        check_measured(search, [DataSpec.of("reasoning_gym", validation=0)])


def test_rungs_by_accuracy_need_answers_at_rungs() -> None:
    stopping = StoppingSettings(kind="median", metric="eval/accuracy")
    search = SearchSettings(metric="train/loss", stopping=stopping)
    with pytest.raises(ConfigError, match="generate_at"):
        check_measured(search, [DataSpec.of("reasoning_gym", generate=True)])
    check_measured(search, [DataSpec.of("reasoning_gym", generate=True, generate_at="evaluation")])


def test_a_metric_is_taken_where_all_data_gives_it() -> None:
    without, generated = (
        DataSpec.of("reasoning_gym", validation=0),
        DataSpec.of("reasoning_gym", generate=True),
    )
    lines = DataSpec.of("file", path="x.jsonl")
    for metric, gives in (("train/loss", lines), ("eval/loss", lines), ("eval/accuracy", generated)):
        search = SearchSettings(metric=metric)
        check_measured(search, [gives])
        if metric == "train/loss":
            check_measured(search, [gives, without])
        else:
            with pytest.raises(ConfigError, match=metric):
                check_measured(search, [gives, without])

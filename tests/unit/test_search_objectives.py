"""Several objectives, constraints, points that come first, knowledge of an earlier study."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from job_results import ended
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState
from studies import space_of, study_of

from plait.config.build import settings_of
from plait.config.overrides import read_request
from plait.core.errors import ConfigError, SearchError
from plait.core.jobs import DataSpec, JobSpec, TrainSpec
from plait.core.objectives import MORE_IS_BETTER, Constraint, Objective, pareto_front
from plait.core.settings import RunSettings, SearchSettings, StoppingSettings, TrackingSettings
from plait.search.identity import identify
from plait.search.objective import check_measured, check_objectives
from plait.search.prior import describe_prior
from plait.search.results import SearchEnd, describe_result, short, write_result
from plait.search.rungs import RUNG_METRICS
from plait.search.samplers import SAMPLERS
from plait.search.storage import open_storage
from plait.search.study import StudyTrials, suggest_jobs
from plait.search.trials import Trial
from plait.tracking.leaderboard import JobRecord, Leaderboard

DIRECTIONS = ("minimize", "maximize")
NUMBERS = ("adapter.rank=range(4,65)", "train.lr=tag(log,interval(1e-5,1e-1))")
COUNTED = ("adapter.rank=4,8,16", "train.batch_size=1,2,4")
TWO = {"metric": ("eval/loss", "adapter.rank"), "constraints": {"adapter.rank": "<= 32"}}


def source(
    arguments: Sequence[str] = NUMBERS, storage: BaseStorage | None = None, **settings: Any
) -> StudyTrials:
    return study_of(space_of(*arguments), replace(SearchSettings(), **settings), storage)


def loss(trial: Trial) -> float:
    rank, lr = trial.values["adapter.rank"], trial.values.get("train.lr", 1e-3)
    assert isinstance(rank, int)
    assert isinstance(lr, float)
    return 1.0 / rank + abs(math.log10(lr) + 3.0)


def tell(trials: StudyTrials, trial: Trial, state: str = "finished") -> None:
    rank = float(str(trial.values["adapter.rank"]))
    if state == "finished":
        broken = {"adapter.rank <= 32": rank - 32}
        trials.tell(trial, ended("finished", loss(trial), "", others=(rank,), violations=broken))
    else:
        trials.tell(trial, ended("pruned" if state == "pruned" else "failed", None, "made up"))


def draw(trials: StudyTrials, count: int) -> list[Trial]:
    """Asked and told one after another, with a single objective."""
    drawn = []
    for _ in range(count):
        trial = trials.ask()
        assert trial is not None
        trials.tell(trial, ended("finished", loss(trial)))
        drawn.append(trial)
    return drawn


# ---- the front -------------------------------------------------------------------------------------------


@given(data=st.data(), directions=st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=4))
def test_the_front_is_complete_and_none_of_it_is_dominated(
    data: st.DataObject, directions: list[str]
) -> None:
    point = st.tuples(*[st.integers(0, 4)] * len(directions))
    points = data.draw(st.lists(point, max_size=24))
    objectives = [Objective(f"m{at}", direction) for at, direction in enumerate(directions)]

    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        signed = [
            (a, b) if each == "minimize" else (-a, -b)
            for a, b, each in zip(one, other, directions, strict=True)
        ]
        return all(a <= b for a, b in signed) and any(a < b for a, b in signed)

    expected = {at for at, mine in enumerate(points) if not any(beats(other, mine) for other in points)}
    front = pareto_front(points, objectives)
    assert set(front) == expected
    assert len(front) == len(expected)
    first = [objectives[0].badness(points[at][0]) for at in front]
    assert first == sorted(first)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["finished", "pruned", "failed"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=14,
    )
)
def test_board_and_study_call_the_same_trials_best(rows: list[tuple[str, int, int, bool]]) -> None:
    """Whoever broke a constraint or did not finish is on no front, and stands behind it on a leaderboard."""
    objectives = (Objective("eval/loss"), Objective("adapter.rank", "maximize"))
    board = Leaderboard("minimize", len(rows), others=objectives[1:])
    finished = []
    for number, (state, one, two, feasible) in enumerate(rows):
        board.add(JobRecord(f"trial-{number:04d}", number))
        value = None if state == "failed" else float(one)
        broken = {"x <= 1": -1.0 if feasible else 1.0}
        name = f"trial-{number:04d}"
        result = ended(state, value, job=name, trial=number, others=(float(two),), violations=broken)
        board.handle(result)
        finished.append(result)
    front = [item.trial for item in SearchEnd(tuple(finished)).front(objectives)]
    assert [record.trial for record in board.front()] == front
    assert [record.trial for record in board.ordered()][: len(front)] == front
    assert board.best() is None
    assert all(rows[number][0] == "finished" and rows[number][3] for number in front)


def test_the_best_by_one_objective_satisfies_the_constraints() -> None:
    board = Leaderboard("minimize", 2)
    board.handle(ended("finished", 1.0, job="a", violations={"x": 1.0}))
    assert board.best() is None
    board.handle(ended("finished", 2.0, job="b"))
    best = board.best()
    assert best is not None
    assert (best.name, board.front()) == ("b", [])
    assert [record.name for record in board.ordered()] == ["b", "a"]


# ---- settings --------------------------------------------------------------------------------------------


def test_lists_of_one_are_the_one() -> None:
    search = SearchSettings(metric=("eval/loss",), direction=("maximize",))
    assert search == SearchSettings(metric="eval/loss", direction="maximize")
    assert search.objectives == (Objective("eval/loss", "maximize"),)


def test_objectives_without_a_direction_have_their_own() -> None:
    search = SearchSettings(metric=("eval/loss", "eval/accuracy", "throughput/tokens_per_s", "adapter.rank"))
    assert [each.direction for each in search.objectives] == ["minimize", "maximize", "maximize", "minimize"]
    assert set(MORE_IS_BETTER) < set(RUNG_METRICS)


def test_one_direction_serves_all_objectives() -> None:
    given = {"metric": ["eval/loss", "adapter.rank"], "constraints": {"adapter": {"rank": ">=4"}}}
    search = settings_of({"search": given}).search
    assert [each.direction for each in search.objectives] == ["minimize", "minimize"]
    assert search.limits == (Constraint("adapter.rank", False, 4.0),)
    assert (search.limits[0].violation(5.0), search.limits[0].violation(1.0)) == (-1.0, 3.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"metric": ("eval/loss", "eval/loss")}, "once"),
        ({"metric": ()}, "once"),
        ({"metric": ("eval/loss", "adapter.rank"), "direction": ("minimize",) * 3}, "for each objective"),
        ({"metric": ("eval/loss", "adapter.rank"), "direction": ("up", "minimize")}, "maximize, minimize"),
        ({"direction": ("minimize", "minimize")}, "for each objective"),
        ({"constraints": {"adapter.rank": "32"}}, "<= or >="),
        ({"constraints": {"adapter.rank": "<= nan"}}, "<= or >="),
        ({"constraints": {"adapter.rank": "== 3"}}, "<= or >="),
        ({"enqueue": ({}, {}), "trials": 1}, "count as trials"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchSettings(**given)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        (DataSpec.of("reasoning_gym"), "Set data.generate=true."),
        (DataSpec.of("file", path="a"), "Set data.generate=true data.scorer=package.module:function."),
    ],
)
def test_what_accuracy_needs_depends_on_the_data(spec: DataSpec, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_measured(SearchSettings(metric="eval/accuracy", direction="maximize"), [spec])
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"stopping": StoppingSettings(kind="median", metric="eval/accuracy")}, "search.stopping.metric="),
        ({"constraints": {"eval/accuracy": ">= 0.5"}}, "search.constraints: eval/accuracy >= 0.5 with"),
    ],
)
def test_accuracy_that_is_not_measured_is_said_with_the_setting_that_names_it(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_measured(SearchSettings(**given), [DataSpec.of("reasoning_gym")])
    assert caught.value.value.startswith(named)


def test_a_constraint_that_is_not_measured_is_not_answered_with_a_metric_alone() -> None:
    search = SearchSettings(metric="train/loss", constraints={"eval/loss": "<= 3"})
    with pytest.raises(ConfigError) as caught:
        check_measured(search, [DataSpec.of("reasoning_gym", validation=0)])
    assert caught.value.remedy == "Set data.validation=0.1, or leave it out."  # a constraint is a mapping


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"metric": "adapter.alpha"}, ("search.metric='adapter.alpha'", "An objective must", "adapter.rank")),
        (
            {"constraints": {"adapter.target_modules": "<= 2"}},
            ("search.constraints: adapter.target_modules <= 2", "A constraint's metric must", "train.lr"),
        ),
    ],
)
def test_a_metric_that_no_trial_has_is_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    jobs = [JobSpec("a"), JobSpec("b", train=TrainSpec(steps=None, epochs=1.0))]
    with pytest.raises(ConfigError) as caught:
        check_objectives(SearchSettings(**given), jobs)
    assert all(each in str(caught.value) for each in named)
    assert ("objective" in str(caught.value)) == ("metric" in given)
    with pytest.raises(ConfigError, match=r"train\.steps"):  # a number in some jobs only
        check_objectives(SearchSettings(metric="train.steps"), jobs)
    check_objectives(SearchSettings(metric=("train/loss", "train.lr")), jobs)


def test_objectives_constraints_and_priors_belong_to_the_identity_and_points_do_not() -> None:
    space = read_request(NUMBERS, {}, {}).space

    def name(**given: Any) -> str:
        return identify(space, JobSpec("base"), RunSettings(search=SearchSettings(**given))).name

    other = [
        {"metric": ("eval/loss", "adapter.rank")},
        {"constraints": {"adapter.rank": "<= 3"}},
        {"prior": "p"},
    ]
    assert len({name(), *(name(**given) for given in other)}) == 4
    assert name(enqueue=({"adapter.rank": "8"},)) == name()
    assert name(constraints={"a": "<= 1", "b": ">= 2"}) == name(constraints={"b": ">=2", "a": "<=1.0"})


# ---- the study -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if SAMPLERS.get(name).several_objectives])
@pytest.mark.filterwarnings("error::FutureWarning", "error::UserWarning")
def test_samplers_suggest_for_two_objectives_and_a_constraint(sampler: str) -> None:
    storage = InMemoryStorage()
    arguments = COUNTED if sampler == "grid" else NUMBERS
    settings = TWO | {"sampler": sampler, "trials": 14, "direction": ("minimize", "minimize")}
    trials = source(arguments, storage, **settings)
    for number in range(trials.total):
        trial = trials.ask()
        assert trial is not None
        trials.report(trial, 1, 0.5)  # Optuna takes none of several objectives, so it must not be asked to
        tell(trials, trial, {3: "pruned", 4: "failed"}.get(number, "finished"))
    study = optuna.load_study(study_name=None, storage=storage)
    assert study.metric_names == ["eval/loss", "adapter.rank"]
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    assert all(
        item.constraints == {"adapter.rank <= 32": item.params["adapter.rank"] - 32} for item in complete
    )
    front = SearchEnd(tuple(trials.finished())).front(settings_objectives(settings))
    assert sorted(item.trial for item in front) == [item.number for item in study.best_trials]
    assert [item.state for item in trials.finished()].count("finished") == len(complete)


def settings_objectives(settings: dict[str, Any]) -> tuple[Objective, ...]:
    return SearchSettings(**settings).objectives


def test_a_resumed_search_of_two_objectives_is_unchanged() -> None:
    def drawn(reopen: bool) -> list[Trial]:
        storage, found = InMemoryStorage(), []
        trials = source(storage=storage, trials=15, seed=4, **TWO)
        for _ in range(15):
            trial = trials.ask()
            assert trial is not None
            found.append(trial)
            tell(trials, trial)
            trials = source(storage=storage, trials=15, seed=4, **TWO) if reopen else trials
        return found

    assert drawn(False) == drawn(True)


def test_the_front_as_text_and_as_the_file_of_the_optuna_sweeper(tmp_path: Path) -> None:
    settings = SearchSettings(trials=12, seed=1, **TWO)  # type: ignore[arg-type]  # keyword by keyword
    trials = source(trials=12, seed=1, **TWO)
    while (trial := trials.ask()) is not None:
        tell(trials, trial)
    result = SearchEnd(tuple(trials.finished()))
    front = result.front(settings.objectives)
    write_result(result, settings, tmp_path)
    written = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert written["solutions"] == [
        {"params": item.parameters, "values": list(item.values)} for item in front
    ]
    assert "best_value" not in written
    lines = describe_result(result, settings, "s", "plait leaderboard s", exhausted=False)
    assert sum(line.startswith("  trial-") for line in lines) == len(front) > 0
    nothing = replace(settings, constraints={"adapter.rank": "<= 1"})
    broken = tuple(replace(item, violations={"adapter.rank <= 1": 3.0}) for item in front)
    said = describe_result(SearchEnd(broken), nothing, "s", "plait leaderboard s", exhausted=False)
    assert "No trial satisfies adapter.rank <= 1." in said
    assert said[-1].endswith("`plait leaderboard s` shows it.")


@pytest.mark.parametrize(("wanted", "exhausted"), [(3, False), (10, True)])
def test_trials_are_not_offered_where_no_point_is_left(wanted: int, exhausted: bool) -> None:
    trials = source(["adapter.rank=4,8", "adapter.dropout=0,0.1"], trials=wanted)
    drawn = []
    while (trial := trials.ask()) is not None:
        drawn.append(trial)
        trials.tell(trial, ended("finished", 1.0))
    assert trials.exhausted == exhausted
    assert len(drawn) == min(wanted, 4)
    result = SearchEnd(tuple(trials.finished()))
    first, *_, last = describe_result(result, SearchSettings(), "s", "", exhausted=trials.exhausted)
    assert ("search.trials=N adds to it" in last) != exhausted
    assert first.endswith("Every point of the search space has been tried.") == exhausted


# ---- points that come first ------------------------------------------------------------------------------

POINTS = ({"adapter.rank": "8", "train.lr": "2e-4"}, {"adapter.rank": "16"})


def test_points_come_first_once_and_count() -> None:
    storage = InMemoryStorage()
    for _ in range(3):  # however often the search is begun again
        trials = source(storage=storage, trials=4, sampler="random", enqueue=POINTS, name="s")
    first, second, *rest = draw(trials, 4)
    assert first.values == {"adapter.rank": 8, "train.lr": 2e-4}
    assert second.values["adapter.rank"] == 16
    assert len(rest) == 2
    assert trials.ask() is None
    assert trials.total == 4


def test_points_may_be_added_later_and_moved() -> None:
    storage = InMemoryStorage()
    draw(source(storage=storage, trials=2, sampler="random", enqueue=POINTS, name="s"), 2)
    more = ({"adapter.rank": "32"}, *reversed(POINTS))
    trials = source(storage=storage, trials=3, sampler="random", enqueue=more, name="s")
    assert trials.total == 3
    assert draw(trials, 1)[0].values["adapter.rank"] == 32
    assert trials.ask() is None
    # All have been drawn: what is added now comes on top. A point that stands twice is tried twice.
    again = (*more, {"adapter.rank": "32"})
    trials = source(storage=storage, trials=4, sampler="random", enqueue=again, name="s")
    assert (draw(trials, 1)[0].values["adapter.rank"], trials.ask()) == (32, None)
    five = (*again, {"adapter.rank": "5"})
    trials = source(storage=storage, trials=5, sampler="random", enqueue=five, name="s")
    assert (draw(trials, 1)[0].values["adapter.rank"], trials.total) == (5, 5)


def test_a_point_added_to_a_search_with_all_its_trials_is_an_extra_trial() -> None:
    storage = InMemoryStorage()
    draw(source(storage=storage, trials=3, sampler="random", name="s"), 3)
    trials = source(storage=storage, trials=3, sampler="random", enqueue=POINTS, name="s")
    assert trials.total == 5
    assert [trial.values["adapter.rank"] for trial in draw(trials, 2)] == [8, 16]
    assert trials.ask() is None


@pytest.mark.parametrize(
    ("points", "named"),
    [
        (({"adapter.rank": "8"}, {"adapter.rank": "65"}), "search.enqueue[1]: adapter.rank=65"),
        (({"adapter.rang": "8"},), "adapter.rank, train.lr"),
    ],
)
def test_points_outside_of_the_space_are_refused(points: tuple[dict[str, str], ...], named: str) -> None:
    with pytest.raises(SearchError) as caught:
        source(enqueue=points)
    assert named in str(caught.value)


# ---- knowledge of an earlier study -----------------------------------------------------------------------


def earlier(
    storage: BaseStorage, arguments: Sequence[str] = NUMBERS, trials: int = 40, **settings: Any
) -> None:
    draw(source(arguments, storage, name="earlier", trials=trials, sampler="random", **settings), trials)


def distance(trials: Sequence[Trial]) -> float:
    return sum(abs(math.log10(float(str(trial.values["train.lr"]))) + 3) for trial in trials) / len(trials)


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes"])
def test_earlier_trials_are_used_and_do_not_count_as_trials(sampler: str) -> None:
    storage = InMemoryStorage()
    earlier(storage)
    count = 3 if sampler == "gp" else 8
    trials = source(storage=storage, name="new", trials=count, sampler=sampler, prior="earlier")
    drawn = draw(trials, count)
    assert [trial.number for trial in drawn] == list(range(count))
    assert trials.ask() is None
    assert len(trials.finished()) == trials.total == count
    ignorant = draw(source(storage=storage, name="other", trials=count, sampler=sampler), count)
    assert distance(drawn) < 0.6 * distance(ignorant)


def test_known_trials_stay_the_same_when_the_earlier_study_changes() -> None:
    def drawn(lost: bool) -> list[Trial]:
        storage, found = InMemoryStorage(), []
        earlier(storage)
        for _ in range(6):
            trials = source(storage=storage, name="new", trials=6, prior="earlier")
            if lost and "earlier" in optuna.get_all_study_names(storage):
                optuna.delete_study(study_name="earlier", storage=storage)
            found += draw(trials, 1)
        return found

    assert drawn(False) == drawn(True)


def test_a_plan_of_a_search_that_has_begun_needs_the_earlier_study_no_more(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    earlier(storage)
    space, search = space_of(*NUMBERS), SearchSettings(name="new", trials=3, prior="earlier")
    run = RunSettings(search=search, tracking=TrackingSettings(root=tmp_path))
    study_of(space, search, storage, run=run)

    def make_job(trial: Trial) -> JobSpec:
        return JobSpec(str(trial.values))

    command: Any = SimpleNamespace(settings=run, space=space, base=JobSpec("base"), make_job=make_job)
    before = suggest_jobs(command)
    optuna.delete_study(study_name="earlier", storage=storage)
    assert suggest_jobs(command) == before
    command.settings = replace(run, search=replace(search, name="another"))
    with pytest.raises(SearchError, match=r"search\.prior=earlier"):
        suggest_jobs(command)


def test_a_trial_whose_process_died_while_it_drew_gets_the_values_that_it_would_have_had() -> None:
    storage = InMemoryStorage()
    earlier(storage)
    first = source(storage=storage, name="new", trials=6, prior="earlier").ask()
    optuna.delete_study(study_name="new", storage=storage)
    trials = source(storage=storage, name="new", trials=6, prior="earlier")
    optuna.load_study(study_name="new", storage=storage).ask()  # a number, and no values yet
    assert trials.ask() == first


@pytest.mark.parametrize(
    ("sampler", "options", "known", "said"),
    [
        ("tpe", {}, 6, "; tpe suggests at random until it has seen 10"),
        ("gp", {"n_startup_trials": 7}, 6, "; gp suggests at random until it has seen 7"),
        ("tpe", {"n_startup_trials": 6}, 6, None),
        ("tpe", {}, 10, None),
        ("cmaes", {}, 1, None),
    ],
)
def test_a_line_says_when_a_sampler_learns_from_an_earlier_search(
    sampler: str, options: dict[str, int], known: int, said: str | None
) -> None:
    settings = SearchSettings(sampler=sampler, sampler_options=options, prior="earlier")
    line = describe_prior(settings, known)
    trials = "1 finished trial" if known == 1 else f"{known} finished trials"
    start = f"search.prior=earlier: the sampler learns from its {trials}"
    if said is None:
        assert line == start
    else:
        assert line.startswith(start + said)
        assert f"++search.sampler_options.n_startup_trials={known} " in line


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_learn_from_as_many_trials_as_reported(sampler: str) -> None:
    """With the option that is named, the prior decides; by default the same draws are made without it."""
    storage = InMemoryStorage()
    earlier(storage, trials=6)

    def drawn(name: str, **more: Any) -> Mapping[str, object]:
        trial = source(storage=storage, name=name, trials=1, sampler=sampler, **more).ask()
        assert trial is not None
        return trial.values

    by_chance = drawn("without")
    assert drawn("few", prior="earlier") == by_chance
    assert drawn("enough", prior="earlier", sampler_options={"n_startup_trials": 6}) != by_chance


def test_a_search_with_other_ranges_learns_from_trials_inside_them() -> None:
    storage = InMemoryStorage()
    earlier(storage, ("adapter.rank=range(4,200)", "train.lr=tag(log,interval(1e-5,1e-1))"))
    trials = source(storage=storage, name="new", trials=6, prior="earlier")
    known = trials.prior
    assert 0 < len(known) < 40
    assert all(4 <= int(str(each.params["adapter.rank"])) <= 64 for each in known)
    assert len(draw(trials, 6)) == 6


@pytest.mark.parametrize(
    ("arguments", "settings", "named"),
    [
        (NUMBERS, {"prior": "none"}, "earlier"),
        (NUMBERS, {"prior": "new"}, "earlier"),
        (NUMBERS, {"metric": "train/loss"}, "was eval/loss, now train/loss"),
        (NUMBERS, {"direction": "maximize"}, "was minimize, now maximize"),
        (NUMBERS, {"constraints": {"adapter.rank": "<= 8"}}, "search.constraints"),
        (NUMBERS[:1], {}, "train.lr: searched there only"),
        ((*NUMBERS, "train.seed=1,2"), {}, "train.seed: searched here only"),
        (("adapter.rank=range(100,200)", NUMBERS[1]), {}, "None of its 40"),
        (NUMBERS, {"sampler": "random"}, "cmaes, gp, tpe"),
    ],
)
def test_studies_that_say_nothing_are_refused(
    arguments: Sequence[str], settings: dict[str, Any], named: str
) -> None:
    storage = InMemoryStorage()
    earlier(storage)
    with pytest.raises(SearchError) as caught:
        source(arguments, storage, **{"name": "new", "prior": "earlier", "trials": 3} | settings)
    assert named in str(caught.value)
    assert optuna.get_all_study_names(storage) == ["earlier"], "what is refused leaves nothing behind"


def test_an_earlier_study_of_several_objectives_is_known_with_its_constraints() -> None:
    storage = InMemoryStorage()
    trials = source(storage=storage, name="earlier", trials=12, **TWO)
    while (trial := trials.ask()) is not None:
        tell(trials, trial)
    trials = source(storage=storage, name="new", trials=12, prior="earlier", **TWO)
    assert [set(each.constraints) for each in trials.prior] == [{"adapter.rank <= 32"}] * 12
    while (trial := trials.ask()) is not None:
        tell(trials, trial)
    assert len(trials.finished()) == 12


def test_a_list_is_shown_as_an_override_takes_it() -> None:
    assert [short(each) for each in (("q_proj", "v_proj"), [0.9, 0.99999], ("a",), 2e-4, None)] == [
        "[q_proj,v_proj]",
        "[0.9,1]",
        "[a]",
        "0.0002",
        "None",
    ]

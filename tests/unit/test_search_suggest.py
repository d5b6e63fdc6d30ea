"""In a finite space no combination is trained twice: training is deterministic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_results import ended
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from studies import space_of, study_of

from plait.core.settings import SearchSettings
from plait.core.space import Choice, Dimension, Real, Space, Value, Whole
from plait.search.points import OutsideValue, too_few_points
from plait.search.samplers import SAMPLERS, Sampler
from plait.search.storage import open_storage
from plait.search.study import StudyTrials
from plait.search.suggest import check_options, distributions
from plait.search.trials import Trial

EIGHT = ("adapter.rank=4,8", "adapter.dropout=0,0.1", "train.batch_size=choice(2,8)")
NUMBERS = ("adapter.rank=range(4,8)", "train.steps=range(10,30,10)")  # eight as well, in numbers
CONTINUOUS = ("adapter.rank=4,8,16", "train.lr=tag(log,interval(1e-5,1e-3))")
NAMES = ("tpe", "random", "grid", "cmaes", "qmc", "gp", "nsgaii")


def source(
    space: Space | tuple[str, ...] = EIGHT,
    storage: BaseStorage | None = None,
    folder: Path | None = None,
    **settings_: Any,
) -> StudyTrials:
    search = replace(SearchSettings(name="s", trials=12), **settings_)
    space = space if isinstance(space, Space) else space_of(*space)
    where = None if folder is None else lambda _: folder
    return study_of(space, search, storage, folder=where)


def point(trial: Trial) -> tuple[tuple[str, Value], ...]:
    return tuple(trial.values.items())


def tell(trials: StudyTrials, trial: Trial, others: tuple[float, ...] = ()) -> None:
    loss = sum(math.sin(hash(value)) for value in trial.values.values() if not isinstance(value, str))
    outcomes = [ended("finished", loss, "", others=others)] * 3
    outcomes += [ended("failed", None, "nan"), ended("pruned", None, "rung")]
    trials.tell(trial, outcomes[trial.number % 5])


def drawn(trials: StudyTrials, together: int = 3, others: tuple[float, ...] = ()) -> list[Trial]:
    """All that the source draws, some of them told by the time that further ones are drawn."""
    found: list[Trial] = []
    while (trial := trials.ask()) is not None:
        found.append(trial)
        if len(found) >= together:
            tell(trials, found[len(found) - together], others)
    for trial in found[max(0, len(found) - together + 1) :]:
        tell(trials, trial, others)
    return found


@pytest.mark.parametrize(
    ("sampler", "several"),
    [
        *((sampler, False) for sampler in NAMES),
        *((sampler, True) for sampler in NAMES[:3]),
        ("nsgaii", True),
    ],
)
def test_each_sampler_suggests_each_of_a_few_points_once_and_then_ends(sampler: str, several: bool) -> None:
    options: dict[str, Any] = {"sampler_options": {"population_size": 4}} if sampler == "nsgaii" else {}
    if several:
        options |= {"metric": ("eval/loss", "train/tokens"), "direction": ("minimize", "minimize")}
    trials = source(NUMBERS if sampler in ("cmaes", "qmc") else EIGHT, sampler=sampler, **options)
    assert trials.total == 8
    found = drawn(trials, others=(1.0,) if several else ())
    assert len(found) == len({point(trial) for trial in found}) == 8
    assert trials.total == 8


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsgaii"])
def test_suggestions_differ_where_points_cannot_be_counted(sampler: str) -> None:
    """A child in NSGA-II may be its parent once more."""
    options: dict[str, Any] = {"sampler_options": {"population_size": 4}} if sampler == "nsgaii" else {}
    found = drawn(source(CONTINUOUS, sampler=sampler, trials=24, **options))
    assert len(found) == len({point(trial) for trial in found}) == 24


def test_a_sampler_that_repeats_itself_where_points_cannot_be_counted_is_not_asked_for_ever() -> None:
    """Its own seed is the same for every trial: what it suggests stays."""
    found = drawn(source(CONTINUOUS, sampler="random", sampler_options={"seed": 1}, trials=3))
    assert len(found) == 3
    assert len({point(trial) for trial in found}) == 1


class Stubborn(optuna.samplers.RandomSampler):
    """Suggests the same whatever it is asked."""

    def __init__(self, seed: int, value: int) -> None:
        super().__init__(seed)
        self._value = value

    def sample_independent(self, *_: Any) -> int:
        return self._value


@pytest.fixture
def stubborn() -> Iterator[str]:
    SAMPLERS.add("stubborn", Sampler(Stubborn))
    yield "stubborn"
    SAMPLERS.remove("stubborn")


@pytest.mark.parametrize(("high", "trials"), [(12, 12), (10**9, 20)])
def test_a_sampler_that_always_says_the_same_is_not_asked_for_ever(
    stubborn: str, high: int, trials: int
) -> None:
    """What is left is listed in a small space, and found by chance in a large one."""
    space = Space((Dimension("adapter.rank", Whole(1, high)),))
    found = drawn(source(space, sampler=stubborn, sampler_options={"value": 7}, trials=trials))
    assert found[0].values == {"adapter.rank": 7}
    assert len(found) == len({point(trial) for trial in found}) == trials


def add_outside(trials: StudyTrials) -> int:
    return trials.enqueue(
        {"train.steps": 20},
        outside={"adapter.rank": OutsideValue("64", 64), "train.lr": OutsideValue("1", 1)},
    )


@pytest.mark.parametrize("sampler", NAMES)
def test_a_trial_outside_the_space_does_not_affect_samplers(sampler: str) -> None:
    options: dict[str, Any] = {"sampler_options": {"population_size": 4}} if sampler == "nsgaii" else {}
    trials = source(NUMBERS, sampler=sampler, **options)
    for _ in range(2):
        trial = trials.ask()
        assert trial is not None
        tell(trials, trial)
    number = add_outside(trials)
    found = trials.ask()
    assert found is not None
    assert (found.number, found.values) == (
        number,
        {"train.steps": 20, "adapter.rank": 64, "train.lr": 1},
    )
    assert found.overrides == ("adapter.rank=64", "train.steps=20", "train.lr=1")
    assert found.outside == "adapter.rank=64 train.lr=1"
    trials.tell(found, ended("finished", -100.0))
    rest = drawn(trials)
    assert len(rest) == len({point(trial) for trial in rest}) == 6  # those of the space, each once
    (result,) = [each for each in trials.finished() if each.trial == number]
    assert result.parameters == found.values


def test_a_numbered_sequence_is_continued_after_a_trial_outside_of_the_space() -> None:
    space = Space((Dimension("train.lr", Real(0.0, 1.0)),))

    def rates(trials: StudyTrials) -> list[object]:
        return [found.values["train.lr"] for found in drawn(trials, together=1)]

    undisturbed = rates(source(space, sampler="qmc", trials=12))
    trials = source(space, sampler="qmc", trials=12)
    first = trials.ask()
    assert first is not None
    tell(trials, first)
    trials.enqueue({}, outside={"train.lr": OutsideValue("7", 7)})
    other = trials.ask()
    assert other is not None
    trials.tell(other, ended("finished", 1.0))
    rest = rates(trials)
    assert [first.values["train.lr"], *rest] == undisturbed


class Watchful(optuna.samplers.RandomSampler):
    """Notes the values of the trials that it is shown."""

    seen: ClassVar[set[float]] = set()

    def sample_relative(self, study: optuna.Study, *more: Any) -> dict[str, Any]:
        finished = study.get_trials(states=(TrialState.COMPLETE,))
        self.seen.update(item.values[0] for item in finished)
        return super().sample_relative(study, *more)


def test_samplers_see_no_trial_outside_of_the_space() -> None:
    SAMPLERS.add("watchful", Sampler(Watchful))
    try:
        trials = source(CONTINUOUS, sampler="watchful", trials=3)
        add_outside(trials)
        for loss in (-100.0, 1.0, 2.0, 3.0):
            trial = trials.ask()
            assert trial is not None
            trials.tell(trial, ended("finished", loss))
        assert trials.ask() is None  # it comes on top of the three
    finally:
        SAMPLERS.remove("watchful")
    assert Watchful.seen == {1.0, 2.0}


DOMAINS = st.one_of(
    st.integers(1, 4).map(lambda n: Choice(tuple(range(n)), tuple(map(str, range(n))))),
    st.tuples(st.integers(-3, 3), st.integers(0, 5), st.integers(1, 3)).map(
        lambda each: Whole(each[0], each[0] + each[1], each[2])
    ),
    st.tuples(st.sampled_from([0.0, 0.1, -1.0]), st.integers(1, 4), st.sampled_from([0.1, 0.3, 1.0])).map(
        lambda each: Real(each[0], each[0] + each[1] * each[2], each[2])
    ),
    st.just(Real(2.0, 2.0)),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), domains=st.lists(DOMAINS, min_size=1, max_size=3))
def test_each_point_is_suggested_once_with_enqueued_and_added_ones(
    data: st.DataObject, domains: list[Any]
) -> None:
    space = Space(tuple(Dimension(f"k{at}", domain) for at, domain in enumerate(domains)))
    size = math.prod(domain.count for domain in domains)
    points = st.fixed_dictionaries(
        {},
        optional={
            each.name: st.integers(0, each.domain.count - 1).map(each.domain.at) for each in space.dimensions
        },
    )
    failed = data.draw(st.sampled_from(["keep", "drop"]))
    asked = data.draw(st.integers(1, size + 3))
    trials = source(space, sampler=data.draw(st.sampled_from(["random", "tpe"])), trials=asked, failed=failed)
    own: dict[int, dict[str, Value]] = {}
    found: list[Trial] = []
    added = 0
    while True:
        for given_ in data.draw(st.lists(points, max_size=2)) if len(found) < 6 else []:
            beyond = len(trials.shared.trials()) - added >= asked or data.draw(st.booleans())
            added += beyond
            own[trials.enqueue(given_, beyond=beyond, priority=data.draw(st.sampled_from([None, 1])))] = (
                given_
            )
        total = trials.total
        if (trial := trials.ask()) is None:
            break
        assert total > trial.number, "who stands at a rung waits for those that are to come"
        found.append(trial)
        tell(trials, trial)
    counts = Counter(point(trial) for trial in found)
    for trial in found:
        given_ = own.get(trial.number, {})
        assert given_.items() <= trial.values.items(), "what its owner wants is trained, whatever it equals"
        if trial.number not in own:
            twins = [each.number for each in found if point(each) == point(trial)]
            assert all(number in own for number in twins if number != trial.number)
            assert all(number > trial.number or number == trial.number for number in twins)
    assert (
        len(found)
        == trials.total
        == len(trials.finished()) + (sum(trial.number % 5 == 3 for trial in found) if failed == "drop" else 0)
    )
    assert len(counts) == size or len(found) >= asked


def test_an_enqueued_point_is_suggested_to_no_other_trial() -> None:
    twice = ({"adapter.rank": 4, "adapter.dropout": 0, "train.batch_size": 2},) * 2
    trials = source(enqueue=twice)
    assert trials.total == 9
    found = drawn(trials)
    assert point(found[0]) == point(found[1])
    assert len(found) == 9
    assert len({point(trial) for trial in found}) == 8


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsgaii", "qmc", "grid"])
def test_open_keys_of_enqueued_points_get_different_values(sampler: str) -> None:
    space = {"grid": EIGHT, "qmc": ("adapter.rank=range(4,17,4)", CONTINUOUS[1])}.get(sampler, CONTINUOUS)
    trials = source(space, sampler=sampler, trials=8)
    for at, rank in enumerate((4, 8, 4, 8)):
        trials.enqueue({"adapter.rank": rank}, beyond=False, request=f"{at}")
    found = drawn(trials)
    assert [trial.values["adapter.rank"] for trial in found[:4]] == [4, 8, 4, 8]
    assert len({point(trial) for trial in found}) == 8
    if sampler != "grid":
        assert len({trial.values["train.lr"] for trial in found}) == 8


def test_a_point_without_any_record_is_trained_again() -> None:
    trials = source(("adapter.rank=4,8", "adapter.dropout=0,0.1"), sampler="random")
    found = drawn(trials)
    assert len(found) == 4
    trials.enqueue({"adapter.rank": 4})
    (again,) = drawn(trials)
    assert point(again) in {point(trial) for trial in found}
    assert trials.total == 5


@pytest.mark.parametrize("sampler", ["random", "tpe", "qmc", "cmaes"])
def test_workers_of_one_study_suggest_no_point_twice(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both are in this process, so that neither finds the other's lock taken.
    monkeypatch.setattr("plait.search.ownership.Workers.dead", lambda *_: False)

    def opened() -> StudyTrials:
        return source(NUMBERS, open_storage(None, tmp_path), tmp_path / "s", sampler=sampler)

    workers = [opened(), opened()]
    found = []
    while (trial := workers[len(found) % 2].ask()) is not None:
        found.append(trial)
        if len(found) % 3 == 0:
            tell(workers[(len(found) - 1) % 2], trial)
    for worker in workers:
        worker.close()
    assert len(found) == len({point(trial) for trial in found}) == 8


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_trial_killed_while_being_suggested_keeps_its_point(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process made the trial and wrote some of its values; others draw on before they know of its end."""
    undisturbed = drawn(source(storage=open_storage(None, tmp_path / "whole"), sampler="random"))
    storage = open_storage(None, tmp_path)
    first = source(storage=storage, sampler="random")
    found = [trial for _ in range(3) if (trial := first.ask()) is not None]
    write, values = storage.set_trial_param, iter(range(written))

    def write_until_killed(*value: Any) -> None:
        if next(values, None) is None:
            raise KeyboardInterrupt
        write(*value)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "set_trial_param", write_until_killed)
        with pytest.raises(KeyboardInterrupt):
            first.ask()
    with monkeypatch.context() as patch:
        patch.setattr("plait.search.ownership.Claims.orphans", lambda *_: [])
        found += [trial for _ in range(9) if (trial := first.ask()) is not None]
    assert [trial.number for trial in found] == [0, 1, 2, 4, 5, 6, 7]
    taken = source(storage=storage, sampler="random")
    found = [trial for _ in range(9) if (trial := taken.ask()) is not None]
    assert [point(trial) for trial in found] == [point(trial) for trial in undisturbed]


def test_a_point_of_an_earlier_study_may_be_suggested() -> None:
    """It had other data perhaps; and no point of the same study comes twice."""
    storage = optuna.storages.InMemoryStorage()
    before = source(storage=storage, name="before")
    drawn(before)
    after = source(storage=storage, name="after", prior="before", sampler="tpe")
    found = drawn(after)
    assert len(found) == len({point(trial) for trial in found}) == 8


@pytest.mark.parametrize(
    ("sampler", "trials", "expected"), [("random", 3, 4), ("grid", 3, 4), ("random", 9, 8)]
)
def test_a_search_that_drops_what_failed_knows_its_end(sampler: str, trials: int, expected: int) -> None:
    """Another is drawn for each that failed, as long as there are points."""
    storage = optuna.storages.InMemoryStorage()
    search = source(storage=storage, sampler=sampler, trials=trials, failed="drop")
    while (trial := search.ask()) is not None:
        assert search.over < search.total
        search.tell(trial, ended("failed", None) if trial.number == 1 else ended("finished", 1.0))
    again = source(storage=storage, sampler=sampler, trials=trials, failed="drop")
    assert again.over == again.total == expected
    assert len(again.finished()) == expected - 1


def test_options_of_a_sampler_are_checked_without_a_word_from_optuna() -> None:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        asked = SearchSettings(sampler_options={"n_startup_trials": 1})
        check_options(asked, space_of("adapter.rank=4,8"))
        assert optuna.logging.get_verbosity() == optuna.logging.WARNING
    finally:
        optuna.logging.set_verbosity(before)


def test_a_space_with_fewer_points_than_trials_is_reported() -> None:
    few = too_few_points(SearchSettings(trials=12), space_of(*EIGHT))
    assert few == "Only 8 combinations exist; running 8 trials."
    one = too_few_points(SearchSettings(trials=12), Space((Dimension("k", Choice((4,), ("4",))),)))
    assert one == "Only 1 combination exists, so 1 trial runs."
    assert too_few_points(SearchSettings(trials=8), space_of(*EIGHT)) == ""
    assert too_few_points(SearchSettings(trials=10**9), space_of(*CONTINUOUS)) == ""


@given(DOMAINS, st.integers(0, 20))
def test_indices_of_values_equal_optunas(domain: Any, place: int) -> None:
    place %= domain.count
    value = domain.at(place)
    assert domain.place(value) == place
    distribution = distributions(Space((Dimension("k", domain),)))["k"]
    assert distribution._contains(distribution.to_internal_repr(value))
    assert (domain.count == 1) == distribution.single()

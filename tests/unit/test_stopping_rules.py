"""Which trials end early: the rules alone, on tables of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import ConfigError, PlaitError
from plait.core.objectives import Objective
from plait.core.rungs import Share, step_of
from plait.core.settings import SearchSettings, StoppingSettings
from plait.search.rungs import (
    Brackets,
    RungRecord,
    RungTable,
    describe_metric,
    describe_rungs,
    rung_metric,
    unit_of,
)
from plait.search.stopping import (
    RULES,
    CohortRule,
    Decision,
    OptunaPrunerRule,
    PerTrialRule,
    Rule,
    RuleRequest,
    StoppingRule,
    check_stopping,
    make_rule,
    rungs_within,
)


def rule(budget: int = 16, *, metric: str = "eval/loss", trials: int = 8, **stopping: Any) -> Rule:
    search = SearchSettings(trials=trials, metric=metric, stopping=StoppingSettings(**stopping))
    made = make_rule(search, {budget})
    assert made is not None
    return made


def table(
    values: Mapping[int, Mapping[int, float]], expected: int | None, ended: Sequence[int] = ()
) -> RungTable:
    return RungTable({n: RungRecord(v, n in ended) for n, v in values.items()}, expected)


def actions(made: Rule, numbers: Sequence[int], step: int, values: RungTable) -> dict[int, str]:
    return {number: made.decide(number, step, values).action for number in numbers}


# ---- where the rungs are -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stopping", "budget", "expected"),
    [
        ({}, 40, (5, 10, 20)),
        ({}, 100, (13, 26, 52)),
        ({"eta": 4}, 40, (5, 20)),
        ({"eta": 3, "min_steps": 2}, 40, (2, 6, 18)),
        ({"min_steps": 4, "max_steps": 16}, 40, (4, 8, 16)),
        ({"rungs": (20, 5, 5)}, 40, (5, 20)),
        ({"every": 15}, 40, (15, 30)),
        ({"kind": "patience"}, 40, (5, 10, 15, 20, 25, 30, 35)),
        ({"kind": "none"}, 1, ()),
    ],
)
def test_rungs_lie_within_the_budget(stopping: dict[str, Any], budget: int, expected: Any) -> None:
    assert rungs_within(StoppingSettings(**{"kind": "successive_halving"} | stopping), {budget}) == expected


@pytest.mark.parametrize(
    ("stopping", "budget", "said"),
    [
        ({"rungs": (5, 40)}, 40, r"search\.stopping\.rungs=40 with a budget of 40"),
        ({"rungs": ()}, 40, "rungs"),
        ({"every": 40}, 40, "every=40"),
        ({"min_steps": 50}, 40, "min_steps=50"),
        ({"max_steps": 50}, 40, "max_steps=50"),
        ({}, 1, "budget of 1"),
        ({"rungs": (0.1, 0.95)}, 8, r"rungs=0\.95 with a budget of 8"),
    ],
)
def test_a_rung_beyond_the_budget_is_refused(stopping: dict[str, Any], budget: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rungs_within(StoppingSettings(**{"kind": "successive_halving"} | stopping), {budget})


@pytest.mark.parametrize(
    ("stopping", "expected", "names"),
    [
        ({}, (1250, 2500, 5000), "12.5 % 25 % 50 %"),
        ({"kind": "patience"}, range(1250, 10_000, 1250), "12.5 % 25 % 37.5 % 50 % 62.5 % 75 % 87.5 %"),
        ({"rungs": (0.25, 1 / 16, 0.25)}, (625, 2500), "6.25 % 25 %"),
        ({"rungs": (2, 4.0)}, (2, 4), "2 4"),
        ({"max_steps": 3}, (1, 2), "1 2"),
    ],
)
def test_jobs_of_different_budgets_have_rungs_at_shares_of_them(
    stopping: dict[str, Any], expected: Any, names: str
) -> None:
    rule = StoppingSettings(**{"kind": "successive_halving"} | stopping)
    found = rungs_within(rule, {128, 8})
    assert found == tuple(expected)
    assert " ".join(map(str, found)) == names
    said = describe_rungs(rule, {128, 8}, unit_of(rule, {128, 8}), found)
    assert ("favours large batches" in "".join(said)) == (names in ("2 4", "1 2"))
    assert not describe_rungs(rule, {8}, "steps", rungs_within(rule, {8}, "steps"))


def test_the_start_says_where_rungs_are_that_were_left_open_and_are_shares() -> None:
    rule = StoppingSettings(kind="successive_halving")
    rungs = rungs_within(rule, {128, 98})
    assert describe_rungs(rule, {128, 98}, "shares", rungs) == [
        "Rungs are at 13.3 %, 26.5 %, 53.1 % of each trial's own steps, because trials have 98 to 128 steps."
    ]
    assert describe_rungs(rule, {98}, "shares", rungs) == [
        "Rungs are at 13.3 %, 26.5 %, 53.1 % of each trial's own steps."
    ]
    given = StoppingSettings(kind="successive_halving", rungs=(0.25, 0.5))
    assert describe_rungs(given, {128, 98}, "shares", rungs_within(given, {128, 98})) == []


def test_the_start_says_what_a_pruners_steps_are_where_rungs_are_shares() -> None:
    rule = StoppingSettings(kind="optuna", pruner="MedianPruner", options={"n_warmup_steps": 2})
    said = describe_rungs(rule, {128, 8}, "shares", rungs_within(rule, {128, 8}))
    assert "search.stopping.pruner=MedianPruner" in said[1]
    assert "ten-thousandths" in said[1]
    assert not describe_rungs(rule, {8}, unit_of(rule, {8}), ())
    assert "ten-thousandths" not in "".join(describe_rungs(rule, {128, 8}, "steps", ()))


@pytest.mark.parametrize(
    ("placed", "said"), [({"rungs": (2, 4)}, r"rungs=\[2,4\]"), ({"every": 3}, "every=3")]
)
def test_rungs_in_steps_of_a_study_of_shares_are_refused(placed: dict[str, Any], said: str) -> None:
    rule = StoppingSettings(kind="successive_halving", **placed)
    with pytest.raises(ConfigError, match=f"search.stopping.{said}") as raised:
        unit_of(rule, {8}, lambda _: "shares")
    assert "shares of each trial's own steps" in str(raised.value)
    assert unit_of(rule, {8}) == "steps"


def test_rungs_left_open_follow_the_unit_of_the_study() -> None:
    rule = StoppingSettings(kind="successive_halving")
    assert rungs_within(rule, {128, 8}, "steps") == (1, 2, 4)
    assert list(map(str, rungs_within(rule, {8}, "shares"))) == ["12.5 %", "25 %", "50 %"]


@given(steps=st.integers(1, 20_000), share=st.floats(1e-4, 1, exclude_max=True))
def test_a_share_of_the_steps_is_rounded_up_to_the_next_step(steps: int, share: float) -> None:
    rung = Share.of(share)
    step = step_of(rung, steps)
    assert 1 <= step <= steps
    assert step - 1 < steps * int(rung) / 10_000 <= step
    assert abs(int(rung) / 10_000 - share) <= 1e-4
    assert step_of(7, steps) == 7


@pytest.mark.parametrize(
    ("stopping", "said"),
    [
        ({"rungs": (0.5, 2)}, r"rungs=\[0.5,2\]"),
        ({"rungs": (1.5,)}, "whole numbers of optimiser steps, or shares"),
        ({"rungs": (0, 2)}, "between 0 and 1"),
        ({"rungs": (-0.5,)}, "between 0 and 1"),
        ({"rungs": (1.0,)}, r"rungs=\[1\.0\](.|\n)*nothing is left to stop"),
        ({"rungs": (0.5, 1.0)}, "nothing is left to stop"),
        ({"rungs": (0.5, 1)}, "nothing is left to stop"),
        ({"eta": 1}, "eta must be at least 2"),
        ({"rungs": (1,), "every": 2}, "Set only one of them"),
        ({"divergence": 0.5}, "above 1"),
        ({"divergence_from": "end"}, "best, start"),
        ({"direction": "down"}, "maximize, minimize"),
    ],
)
def test_settings_that_make_no_sense_are_refused(stopping: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StoppingSettings(**stopping)


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"metric": "job/completion_seconds"}, "metrics at rungs are"),
        ({"stopping": StoppingSettings("asha", metric="loss")}, "train/loss"),
        (
            {"stopping": StoppingSettings("asha", metric="train/tokens", divergence=2.0)},
            "can only be detected in a loss",
        ),
        (
            {"stopping": StoppingSettings("asha", direction="maximize", divergence=2.0)},
            "in a loss that is minimised",
        ),
    ],
)
def test_a_metric_that_is_not_measured_at_rungs_is_refused(search: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rung_metric(SearchSettings(**search))


def test_the_direction_follows_the_metric() -> None:
    other = StoppingSettings("asha", metric="throughput/tokens_per_s")
    assert rung_metric(SearchSettings(stopping=other)) == Objective("throughput/tokens_per_s", "maximize")
    both = SearchSettings(
        metric=("eval/loss", "adapter.rank"),
        direction=("minimize", "minimize"),
        stopping=StoppingSettings(kind="median"),
    )
    said = "search/stopping=median goes by eval/loss alone, the first objective: search.stopping.metric names"
    assert describe_metric(both).startswith(said)
    named = replace(both, stopping=StoppingSettings(kind="median", metric="eval/loss"))
    for quiet in (SearchSettings(stopping=both.stopping), named, replace(both, stopping=StoppingSettings())):
        assert describe_metric(quiet) == ""
    assert rung_metric(SearchSettings(direction="maximize")) == Objective("eval/loss", "maximize")


@given(st.integers(0, 4), st.integers(2, 4), st.integers(0, 3000))
def test_brackets_put_every_trial_into_one_cohort(rungs: int, eta: int, number: int) -> None:
    made = Brackets([eta**i for i in range(rungs)], eta)
    cohort = made.cohort(number)
    assert cohort.first <= number < cohort.first + cohort.size
    assert all(made.cohort(n) == cohort for n in range(cohort.first, cohort.first + cohort.size))
    assert cohort.size >= eta ** len(cohort.rungs)


def test_brackets_are_those_of_hyperband() -> None:
    made = Brackets((1, 2, 4), 2)
    found = [made.cohort(first) for first in (0, 8, 14, 18, 22)]
    assert [(c.first, c.size, c.rungs) for c in found] == [
        (0, 8, (1, 2, 4)),
        (8, 6, (2, 4)),
        (14, 4, (4,)),
        (18, 4, ()),
        (22, 8, (1, 2, 4)),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "halving"}, "asha, divergence, hyperband, median, none, optuna"),
        ({"kind": "succesive_halving"}, "Did you mean successive_halving"),
        ({"kind": "threshold"}, r"search\.stopping\.lower, search\.stopping\.upper"),
        ({"kind": "divergence"}, r"needs search\.stopping\.divergence"),
        ({"kind": "asha", "options": {"eta": 3}}, "has no options"),
        ({"kind": "optuna", "pruner": "Pruner"}, "MedianPruner"),
        ({"kind": "optuna", "options": {"startup": 3}}, "n_startup_trials"),
        ({"kind": "optuna", "metric": "train/loss"}, "eval/loss"),
        ({"rungs": (2, 4)}, r"search\.stopping\.rungs=\[2,4\] with search\.stopping\.kind=none"),
        ({"rungs": (2, 4)}, r"or leave it out\. If a file sets it: search\.stopping\.rungs=null\."),
        ({"kind": "asha", "patience": 5}, r"If a file sets it: search\.stopping\.patience=3\."),
        ({"patience": 5}, r"(?s)No trial ends early without a rule.*search/stopping=patience, or leave"),
        ({"kind": "asha", "cohort": 4}, "(?s)does not use it.*median, successive_halving, or leave"),
        ({"kind": "median", "eta": 3}, "asha, hyperband, successive_halving, or leave"),
        ({"kind": "patience", "upper": 3.0}, r"upper=3\.0 with search\.stopping\.kind=patience"),
        ({"kind": "hyperband", "pruner": "NopPruner"}, "search/stopping=optuna, or leave"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_before_anything_is_loaded(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlaitError, match=said):
        check_stopping(SearchSettings(stopping=StoppingSettings(**given)))


def test_a_rule_for_one_objective_is_refused_with_several_and_the_others_are_named() -> None:
    several = SearchSettings(metric=("eval/loss", "adapter.rank"), stopping=StoppingSettings(kind="optuna"))
    with pytest.raises(ConfigError, match="asha, divergence, hyperband, median, none, patience"):
        check_stopping(several)
    check_stopping(replace(several, stopping=StoppingSettings(kind="median")))


@dataclass(frozen=True)
class Limit:
    """Options of a rule that is not in the package."""

    most: float = 2.0


@pytest.fixture
def above_limit() -> Iterator[str]:
    """A rule of another package, registered as its module would do it."""

    def make(ask: RuleRequest) -> Rule:
        most = ask.options.most
        return PerTrialRule(ask.rungs, lambda values: f"above {most:g}" if values[-1] > most else None)

    RULES.add("above_limit", StoppingRule(make, options=Limit))
    yield "above_limit"
    RULES.remove("above_limit")


def test_a_rule_from_outside_has_a_name_and_options_of_its_own(above_limit: str) -> None:
    values = table({0: {1: 2.5}, 1: {1: 1.5}, 2: {1: 3.5}}, 3)
    assert actions(rule(kind=above_limit, rungs=(1,)), range(3), 1, values) == {
        0: "stop", 1: "continue", 2: "stop",
    }  # fmt: skip
    assert actions(rule(kind=above_limit, rungs=(1,), options={"most": 3.0}), range(3), 1, values) == {
        0: "continue", 1: "continue", 2: "stop",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"search\.stopping\.options\.least"):
        rule(kind=above_limit, rungs=(1,), options={"least": 3.0})
    with pytest.raises(ConfigError, match=r"search\.stopping\.options\.most='few'"):
        rule(kind=above_limit, rungs=(1,), options={"most": "few"})


# ---- cohorts -------------------------------------------------------------------------------------------


def test_the_best_half_of_a_cohort_continues_ties_by_number() -> None:
    made = rule(kind="successive_halving", rungs=(4, 8), cohort=4)
    first = {0: {4: 2.0}, 1: {4: 1.0}, 2: {4: 2.0}, 3: {4: 3.0}}
    assert actions(made, range(4), 4, table(first, 8)) == {0: "continue", 1: "continue", 2: "stop", 3: "stop"}
    second = {0: {4: 2.0, 8: 0.5}, 1: {4: 1.0, 8: 0.7}, 2: {4: 2.0}, 3: {4: 3.0}}
    assert actions(made, (0, 1), 8, table(second, 8)) == {0: "continue", 1: "stop"}
    reason = made.decide(3, 4, table(first, 8)).reason
    assert reason == "eval/loss 3 at rung 4: ranked 4 of 4, 2 continue (trials 0 to 3)"
    alone = rule(kind="successive_halving", rungs=(4,), cohort=2)
    reason = alone.decide(1, 4, table({0: {4: 1.0}, 1: {4: 2.0}}, 8)).reason
    assert reason.endswith("ranked 2 of 2, 1 continues (trials 0 to 1)")


@pytest.mark.parametrize("kind", ["successive_halving", "asha", "median"])
def test_trials_that_satisfy_every_constraint_come_first(kind: str) -> None:
    cohort = {} if kind == "asha" else {"cohort": 4}
    made = rule(kind=kind, rungs=(4,), **cohort)
    broken = frozenset({4})
    records = {n: RungRecord({4: float(n)}, violates=broken if n < 2 else frozenset()) for n in range(4)}
    found = actions(made, range(4), 4, RungTable(records, 4))
    assert (found[0], found[1], found[2]) == ("stop", "stop", "continue")
    reason = made.decide(0, 4, RungTable(records, 4)).reason
    assert ("and a broken constraint at rung 4" in reason) == (kind != "asha")


def test_a_trial_that_was_never_trained_is_no_member_of_its_cohort() -> None:
    made = rule(kind="successive_halving", rungs=(4,), cohort=4)
    values: dict[int, RungRecord] = {n: RungRecord({4: float(n)}) for n in (0, 2)}
    rejected = {n: RungRecord(ended=True, rejected=True) for n in (1, 3)}
    found = actions(made, (0, 2), 4, RungTable(values | rejected, 4))
    assert found == {0: "continue", 2: "stop"}  # half of two, and not half of four
    reason = made.decide(2, 4, RungTable(values | rejected, 4)).reason
    assert reason.endswith("ranked 2 of 2, 1 continues (trials 0 to 3, 2 of them infeasible)")


def test_a_cohort_waits_for_all_of_its_members_and_for_no_others() -> None:
    made = rule(kind="successive_halving", rungs=(4,), cohort=4)
    some = {0: {4: 2.0}, 1: {4: 1.0}, 2: {4: 3.0}}
    assert set(actions(made, range(3), 4, table(some, 8)).values()) == {"wait"}
    assert set(actions(made, range(3), 4, table(some | {3: {}}, 8)).values()) == {"wait"}
    assert actions(made, range(3), 4, table(some | {3: {}}, 8, ended=[3])) == {
        0: "continue",
        1: "continue",
        2: "stop",
    }
    assert actions(made, range(3), 4, table(some, 3)) == {0: "stop", 1: "continue", 2: "stop"}


def test_successive_halving_always_keeps_one_member() -> None:
    made = rule(kind="successive_halving", rungs=(4,), cohort=4, eta=4)
    alone = table({4: {4: 2.0}}, 5)
    assert made.decide(4, 4, alone).action == "continue"
    failed = table({0: {}, 1: {}, 2: {}, 3: {4: 9.0}}, 4, ended=[0, 1, 2])
    assert made.decide(3, 4, failed).action == "continue"


def test_trials_beyond_a_rung_before_rungs_were_set_continue() -> None:
    made = rule(kind="successive_halving", rungs=(4, 8), cohort=2)
    values = table({0: {6: 1.0, 8: 1.0}, 1: {4: 2.0, 8: 2.0}}, 2)
    assert actions(made, (0, 1), 8, values) == {0: "continue", 1: "stop"}


def test_maximising_keeps_the_highest() -> None:
    made = rule(kind="successive_halving", rungs=(4,), cohort=2, direction="maximize")
    assert actions(made, (0, 1), 4, table({0: {4: 1.0}, 1: {4: 2.0}}, 2)) == {0: "stop", 1: "continue"}


@settings(max_examples=60)
@given(data=st.data())
def test_decisions_of_cohorts_do_not_depend_on_the_order_of_arrival(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["successive_halving", "hyperband", "median"]))
    trials = data.draw(st.integers(1, 20))
    made = rule(kind=kind, rungs=(2, 4, 8), trials=trials)
    losses = data.draw(
        st.lists(st.tuples(*[st.sampled_from([1.0, 2.0, 3.0, 4.0])] * 3), min_size=trials, max_size=trials)
    )
    failing = data.draw(st.sets(st.integers(0, trials - 1)))
    curves = [dict(zip((2, 4, 8), values, strict=True)) for values in losses]
    results = [_play(made, curves, failing, data.draw(st.permutations(range(trials)))) for _ in range(2)]
    assert results[0] == results[1]


@settings(max_examples=100)
@given(data=st.data())
def test_without_further_suggestions_no_trial_waits_for_missing_numbers(data: st.DataObject) -> None:
    """Trials of higher priority are drawn before those that wait with lower numbers."""
    kind = data.draw(st.sampled_from(["successive_halving", "hyperband", "median", "asha"]))
    drawn = data.draw(st.sets(st.integers(0, 30), min_size=1))
    made = rule(kind=kind, rungs=(2,), trials=data.draw(st.integers(1, 40)), eta=2)
    standing = {number for number in drawn if made.rungs(number)}
    values = {
        number: {2: float(data.draw(st.integers(1, 5)))} if number in standing else {} for number in drawn
    }
    ended = data.draw(st.sets(st.sampled_from(sorted(drawn)))) - standing
    found = actions(made, sorted(standing), 2, table(values, None, sorted(ended | (drawn - standing))))
    assert "wait" not in found.values()
    assert not found or "continue" in found.values()
    late = min(standing, default=0)
    if len(standing) > 1 and kind != "asha":  # of those that were drawn, each is waited for
        others = {n: v for n, v in values.items() if n != late} | {late: {}}
        cohorts = actions(made, sorted(standing - {late}), 2, table(others, None, sorted(drawn - standing)))
        with_late = made.layout.cohort(late).numbers if isinstance(made, CohortRule) else range(0)
        assert {n for n, action in cohorts.items() if action == "wait"} == {
            n for n in cohorts if n in with_late
        }


def _play(
    made: Rule, curves: Sequence[Mapping[int, float]], failing: set[int], order: Sequence[int]
) -> dict[int, int]:
    """Lets trials come to their rungs in this order of preference; how many rungs each was let past."""
    trials = len(curves)
    values: dict[int, dict[int, float]] = {n: {} for n in range(trials)}
    ended: set[int] = set()
    past = dict.fromkeys(range(trials), 0)
    while True:
        moved = False
        for number in order:
            rungs = made.rungs(number)
            if number in ended or past[number] == len(rungs):
                continue
            step = rungs[past[number]]
            if number in failing and past[number] == 1:
                ended.add(number)
                moved = True
            elif step not in values[number]:
                values[number][step] = curves[number][step]
                moved = True
                break
            else:
                decision = made.decide(number, step, table(values, trials, sorted(ended)))
                if decision.action == "wait":
                    continue
                moved = True
                if decision.action == "continue":
                    past[number] += 1
                else:
                    ended.add(number)
                break
        if not moved:
            stuck = [n for n in range(trials) if n not in ended and past[n] < len(made.rungs(n))]
            assert stuck == []
            return past


def test_the_median_rule_takes_the_best_so_far_against_averages_so_far() -> None:
    made = rule(kind="median", rungs=(2, 4), cohort=3)
    values = {0: {2: 1.0, 4: 9.0}, 1: {2: 4.0, 4: 4.0}, 2: {2: 5.0, 4: 3.0}}
    # Averages 5, 4, 4: their median is 4. Best so far 1, 4, 3: nobody is worse at rung 4, but 5 > 4 was at 2.
    assert actions(made, range(3), 2, table(values, 3)) == {0: "continue", 1: "continue", 2: "stop"}
    assert actions(made, (0, 1), 4, table(values, 3)) == {0: "continue", 1: "continue"}


@pytest.mark.parametrize(("parallel", "trials"), [(1, 8), (1, 1), (2, 8), (8, 1)])
def test_a_cohort_has_two_trials_at_least(parallel: int, trials: int) -> None:
    """One alone is never worse than its own median, so nobody would ever be stopped."""
    search = SearchSettings(
        trials=trials, parallel=parallel, stopping=StoppingSettings(kind="median", rungs=(2,))
    )
    made = make_rule(search, {8})
    assert isinstance(made, CohortRule)
    assert made.layout.cohort(0).size == 2
    assert actions(made, (0, 1), 2, table({0: {2: 1.0}, 1: {2: 3.0}}, 8)) == {0: "continue", 1: "stop"}
    assert made.decide(0, 2, table({0: {2: 1.0}}, 8)).action == "wait"


# ---- asynchronous --------------------------------------------------------------------------------------


def test_asha_promotes_at_once_and_depends_on_the_order() -> None:
    made = rule(kind="asha", rungs=(4,), eta=2)
    assert made.decide(0, 4, table({0: {4: 2.0}}, 4)).action == "wait"
    two = table({0: {4: 2.0}, 1: {4: 3.0}}, 4)
    assert actions(made, (0, 1), 4, two) == {0: "continue", 1: "wait"}
    four = table({0: {4: 2.0}, 1: {4: 3.0}, 2: {4: 1.0}, 3: {4: 1.5}}, 4)
    assert actions(made, (1, 2, 3), 4, four) == {1: "stop", 2: "continue", 3: "continue"}
    assert made.decide(0, 4, four).action == "stop"  # let past in time, and only then
    assert (
        made.decide(0, 4, RungTable(dict(four.records) | {0: RungRecord({4: 2.0}, passed=4)}, 4)).action
        == "continue"
    )


def test_asha_ends_who_cannot_come_among_the_best_any_more_and_leaves_one() -> None:
    made = rule(kind="asha", rungs=(4,), eta=4)
    three = table({0: {4: 1.0}, 1: {4: 2.0}, 2: {4: 3.0}}, 6)
    assert actions(made, range(3), 4, three) == {0: "wait", 1: "stop", 2: "stop"}
    assert made.decide(0, 4, table({0: {4: 1.0}, 1: {}}, 2, ended=[1])).action == "continue"


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_asha_continues_only_the_best_of_fewer_than_eta_trials(trials: int) -> None:
    made = rule(kind="asha", rungs=(4,), eta=4, trials=trials)
    values = {number: {4: 1.0 + number} for number in range(trials)}
    found = actions(made, range(trials), 4, table(values, trials))
    assert found == {number: "stop" if number else "continue" for number in range(trials)}
    # As long as one is to come the best waits, even if there can be no more than one to continue.
    some = dict(list(values.items())[: trials - 1])
    assert set(actions(made, range(trials - 1), 4, table(some, trials)).values()) <= {"wait", "stop"}
    assert not some or made.decide(0, 4, table(some, trials)).action == "wait"


# ---- each trial by itself ------------------------------------------------------------------------------


def test_patience_counts_rungs_without_improvement() -> None:
    made = rule(kind="patience", rungs=(1, 2, 3, 4, 5), patience=2, min_delta=0.1)
    values = table({0: {1: 3.0, 2: 2.0, 3: 1.95, 4: 1.0, 5: 1.0}, 1: {1: 1.0, 2: 1.0, 3: 0.95}}, 2)
    assert [made.decide(0, step, values).action for step in range(1, 6)] == ["continue"] * 5
    assert [made.decide(1, step, values).action for step in (1, 2, 3)] == ["continue", "continue", "stop"]


def test_patience_counts_one_measurement_once_where_a_short_trial_reaches_two_rungs_with_it() -> None:
    """A trial of 4 steps reaches 10 and 20 % with its first one, 30 to 50 % with its second."""
    made = rule(kind="patience", rungs=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), patience=1)
    short = {1000: 1.0, 2000: 1.0, 3000: 0.9, 4000: 0.9, 5000: 0.9, 6000: 0.9}
    records = {0: RungRecord(short, steps=4), 1: RungRecord(short, steps=40)}
    found = [actions(made, (0, 1), rung, RungTable(records, 2)) for rung in made.rungs(0)]
    assert [each[0] for each in found] == ["continue"] * 5 + ["stop"]
    assert [each[1] for each in found][:2] == ["continue", "stop"]


def test_a_trial_beyond_the_expected_ones_is_compared_with_its_cohort() -> None:
    """As when a search continues with fewer trials than it had drawn."""
    made = rule(kind="successive_halving", rungs=(1,), cohort=4)
    assert made.decide(3, 1, table({0: {1: 2.0}, 1: {1: 3.0}, 3: {1: 1.0}}, 2)).action == "continue"
    assert made.decide(3, 1, table({0: {1: 2.0}, 1: {1: 3.0}, 3: {1: 4.0}}, 2)).action == "stop"


def test_patience_holds_a_value_against_the_best_and_not_against_the_last() -> None:
    made = rule(kind="patience", rungs=(1, 2, 3), patience=2)
    values = table({0: {1: 1.0, 2: 3.0, 3: 2.0}}, 1)
    assert [made.decide(0, step, values).action for step in (1, 2, 3)] == ["continue", "continue", "stop"]


def test_a_pruner_is_not_asked_again_about_a_trial_it_let_pass() -> None:
    asked: list[int] = []
    made = OptunaPrunerRule((2, 4), lambda number: asked.append(number) is None, "MedianPruner")
    records = RungTable({0: RungRecord({2: 1.0}, passed=2), 1: RungRecord({2: 1.0})}, 2)
    assert made.decide(0, 2, records).action == "continue"
    assert asked == []
    assert made.decide(1, 2, records) == Decision("stop", "MedianPruner at rung 2")
    assert asked == [1]


def test_a_threshold_ends_what_leaves_it() -> None:
    made = rule(kind="threshold", rungs=(1,), lower=1.0, upper=2.0)
    values = table({0: {1: 1.5}, 1: {1: 0.5}, 2: {1: 2.5}, 3: {1: 1.0}, 4: {1: 2.0}}, 5)
    assert actions(made, range(5), 1, values) == {
        0: "continue",
        1: "stop",
        2: "stop",
        3: "continue",
        4: "continue",
    }
    assert made.decide(2, 1, values).reason == "eval/loss 2.5 is above 2 at rung 1"


def test_divergence_fails_a_trial_under_any_rule() -> None:
    best = rule(kind="divergence", rungs=(1, 2, 3), divergence=2.0)
    values = table({0: {1: 3.0, 2: 1.0, 3: 2.5}, 1: {1: 1.0, 2: 2.0, 3: 1.9}}, 2)
    assert best.decide(0, 3, values) == Decision(
        "fail", "diverged: eval/loss 2.5 at rung 3 is more than 2 times its best, 1"
    )
    assert [best.decide(1, step, values).action for step in (1, 2, 3)] == ["continue"] * 3
    start = rule(kind="divergence", rungs=(1, 2, 3), divergence=2.0, divergence_from="start")
    assert start.decide(0, 3, values).action == "continue"
    halving = rule(kind="successive_halving", rungs=(1, 2), cohort=2, divergence=2.0)
    both = table({0: {1: 1.0, 2: 2.5}, 1: {1: 9.0}}, 2, ended=[1])
    assert halving.decide(0, 2, both).action == "fail"


def test_divergence_compares_with_earlier_rungs_only() -> None:
    made = rule(kind="divergence", rungs=(1, 2, 3), divergence=2.0)
    values = table({0: {1: 3.0, 3: 1.0}, 1: {2: 9.0}}, 2)
    assert [made.decide(0, rung, values).action for rung in (1, 2, 3)] == ["continue"] * 3
    assert made.decide(1, 2, values).action == "continue", "its first value"

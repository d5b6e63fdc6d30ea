"""SCIP behind plain data: statuses, limits, warm starts."""

from __future__ import annotations

import itertools
import pickle
from time import sleep

import numpy as np
import pyscipopt
import pytest

from plait.planner.solver import INFINITY, Limits, Program, solve


def _knapsack(seed: int, items: int = 6) -> tuple[Program, np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(seed)
    worth, weight = rng.integers(1, 20, items), rng.integers(1, 20, items)
    room = float(weight.sum()) / 2
    program = Program()
    for value in worth:
        program.variable(upper=1, integer=True, cost=-float(value))
    program.row(list(enumerate(weight.astype(float))), upper=room)
    return program, worth, weight, room


@pytest.mark.parametrize("seed", range(10))
def test_optimum_equals_enumeration(seed: int) -> None:
    program, worth, weight, room = _knapsack(seed)
    best = max(
        sum(worth[list(chosen)], 0)
        for count in range(7)
        for chosen in itertools.combinations(range(6), count)
        if sum(weight[list(chosen)], 0) <= room
    )
    solution = solve(program)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(-best)
    assert solution.bound == pytest.approx(-best)
    assert program.violation(solution.values) == 0


def test_infeasible_is_a_status_and_not_a_warning() -> None:
    program = Program()
    x = program.variable(upper=1, integer=True)
    program.row([(x, 1.0)], lower=2)
    solution = solve(program)
    assert (solution.status, solution.objective, solution.values) == ("infeasible", None, ())
    assert solution.bound == INFINITY


def test_a_solver_without_time_returns_no_values_and_reports_it() -> None:
    program, *_ = _knapsack(0)
    solution = solve(program, Limits(seconds=0.0))
    assert solution.limit_hit == "time"
    assert solution.status in ("unknown", "feasible")


def test_start_survives_a_search_that_stops_at_once() -> None:
    program, *_ = _knapsack(1)
    start = [0.0] * len(program.costs)
    start[0] = 1.0
    solution = solve(program, Limits(seconds=0.0), start)
    assert solution.limit_hit == "time"
    assert solution.status == "feasible"
    assert solution.objective is not None
    assert solution.objective <= program.objective(start)


def test_equal_programs_have_equal_answers() -> None:
    program, *_ = _knapsack(3, items=30)
    copy = pickle.loads(pickle.dumps(program))
    assert solve(program, Limits(nodes=3)) == solve(copy, Limits(nodes=3))


def test_limits_count_processor_time_and_not_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits, as on a machine under load, plans as one that does not."""
    program, *_ = _knapsack(3, items=30)
    undisturbed = solve(program, Limits(seconds=0.5))

    waits = iter((0.6, 0.6))  # each longer than the limit

    class Sleeper(pyscipopt.Eventhdlr):  # type: ignore[misc]
        def eventinit(self) -> None:
            self.model.catchEvent(pyscipopt.SCIP_EVENTTYPE.PRESOLVEROUND, self)
            self.model.catchEvent(pyscipopt.SCIP_EVENTTYPE.NODEFOCUSED, self)

        def eventexec(self, _: object) -> None:
            sleep(next(waits, 0.0))

    class Slow(pyscipopt.Model):  # type: ignore[misc]
        def optimize(self) -> None:
            self.includeEventhdlr(Sleeper(), "sleeper", "waits")
            super().optimize()

    monkeypatch.setattr(pyscipopt, "Model", Slow)
    assert solve(program, Limits(seconds=0.5)) == undisturbed
    assert next(waits, None) is None, "it has waited for longer than the limit before it ended"
    assert undisturbed.limit_hit is None

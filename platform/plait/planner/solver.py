"""Mixed-integer linear programs, solved by SCIP: the only module that imports pyscipopt.

A program is plain data in matrix form, so it can be pickled into other processes, relaxed, and checked
without a solver. Limits are on nodes and gap, so the same program gives the same answer on every machine.
Processor time is only a safety net, which other load does not affect, and :attr:`Solution.limit_hit` says if
it ended the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

INFINITY = math.inf

PROCESSOR_TIME = 1  # SCIP's clock type; 2 is wall-clock time, with which other load would change plans
FEASIBLE = 1e-5  # largest accepted violation of a solution: ten times the solver's own tolerance

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Limit = Literal["nodes", "gap", "time", "solutions"]

_LIMITS: dict[str, Limit] = {  # by SCIP's status
    "totalnodelimit": "nodes",
    "gaplimit": "gap",
    "timelimit": "time",
    "sollimit": "solutions",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop before the optimum is proved.

    Attributes:
        gap: relative distance between objective and bound that is good enough; 0 proves the optimum.
        seconds: processor time, a safety net; a plan that it ended early may not repeat, and says so.
        solutions: number of feasible solutions after which to stop (1: only feasibility is of interest).
    """

    nodes: int = 20_000
    gap: float = 0.0
    seconds: float = 60.0
    solutions: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """lower ≤ Σ coefficient · variable ≤ upper, over ``terms`` of (variable, coefficient)."""

    terms: tuple[tuple[int, float], ...]
    lower: float
    upper: float


@dataclass(slots=True)
class Program:
    """minimise Σ cost · variable + offset, subject to rows and bounds; variables are at least 0, and numbered
    from 0."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def variable(self, *, upper: float = INFINITY, integer: bool = False, cost: float = 0.0) -> int:
        """Add a variable of at least 0 and return its number."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.costs) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, lower: float = -INFINITY, upper: float = INFINITY
    ) -> None:
        """Add the row lower ≤ Σ coefficient · variable ≤ upper."""
        self.rows.append(Row(tuple(terms), lower, upper))

    def violation(self, values: Sequence[float]) -> float:
        """Largest amount by which ``values`` break a row, a bound or integrality; 0 if feasible.

        A row's violation is relative to its largest term, if that is above 1, as is the solver's rounding.
        """
        worst = 0.0
        for value, high, whole in zip(values, self.upper, self.integer, strict=True):
            worst = max(worst, -value / max(1.0, abs(value)), (value - high) / max(1.0, abs(value)))
            worst = max(worst, abs(value - round(value)) if whole else 0.0)
        for row in self.rows:
            parts = [values[index] * coefficient for index, coefficient in row.terms]
            activity, size = sum(parts), max([1.0, *map(abs, parts)])
            worst = max(worst, (row.lower - activity) / size, (activity - row.upper) / size)
        return worst

    def objective(self, values: Sequence[float]) -> float:
        """Σ cost · variable."""
        return sum(cost * value for cost, value in zip(self.costs, values, strict=True))


@dataclass(frozen=True, slots=True)
class Solution:
    """The solver's result.

    Attributes:
        status: "optimal" is proved (within ``Limits.gap`` if that is above 0); "feasible" has values
            but stopped early; "infeasible" is proved; "unknown" stopped early without values, or its values
            are not feasible once integers are rounded.
        bound: proved lower bound of all solutions; -inf if nothing is known.
        values: one for each variable, integers exact; empty without a solution.
    """

    status: Status
    objective: float | None
    bound: float
    values: tuple[float, ...]
    limit_hit: Limit | None


def solve(program: Program, limits: Limits | None = None, start: Sequence[float] | None = None) -> Solution:
    """Solve ``program`` with SCIP; equal input gives equal output unless ``limit_hit`` is "time".

    Args:
        start: a feasible solution to begin from; one that SCIP rejects is ignored.

    Infeasibility and limits are statuses, not errors, and so is SCIP's bare ``Warning``.
    """
    from pyscipopt import Model, quicksum

    limits = limits or Limits()
    model = Model()
    model.hideOutput()
    _set_limits(model, limits)
    variables = [
        model.addVar(
            vtype="I" if whole else "C",
            lb=0.0,
            ub=None if high == INFINITY else high,
            obj=cost,
        )
        for cost, high, whole in zip(program.costs, program.upper, program.integer, strict=True)
    ]
    for row in program.rows:
        activity = quicksum(coefficient * variables[index] for index, coefficient in row.terms)
        if row.lower == row.upper:
            model.addCons(activity == row.lower)
            continue
        if row.upper < INFINITY:
            model.addCons(activity <= row.upper)
        if row.lower > -INFINITY:
            model.addCons(activity >= row.lower)
    if start is not None:
        _add_start(model, variables, start)
    try:
        model.optimize()
        return _read(model, variables, program)
    except Warning:  # SCIP raises a bare Warning if it has no solution
        return Solution("unknown", None, -INFINITY, (), _LIMITS.get(model.getStatus()))


def _set_limits(model: Any, limits: Limits) -> None:
    settings: dict[str, object] = {
        "limits/totalnodes": limits.nodes,
        "limits/gap": limits.gap,
        "limits/time": limits.seconds,
        "timing/clocktype": PROCESSOR_TIME,
        "randomization/randomseedshift": 0,
        "parallel/maxnthreads": 1,
    }
    if limits.solutions is not None:
        settings["limits/solutions"] = limits.solutions
    model.setParams(settings)


def _add_start(model: Any, variables: Sequence[Any], start: Sequence[float]) -> None:
    solution = model.createSol()
    for variable, value in zip(variables, start, strict=True):
        model.setSolVal(solution, variable, value)
    model.addSol(solution)


def _read(model: Any, variables: Sequence[Any], program: Program) -> Solution:
    """The model's state after optimize() as a :class:`Solution`."""
    scip_status = model.getStatus()
    limit = _LIMITS.get(scip_status)
    if scip_status in ("infeasible", "inforunbd"):
        return Solution("infeasible", None, INFINITY, (), None)
    bound = float(model.getDualbound())
    bound = -INFINITY if abs(bound) >= model.infinity() else bound
    if not model.getNSols():
        return Solution("unknown", None, bound, (), limit)
    best = model.getBestSol()
    raw = (model.getSolVal(best, variable) for variable in variables)
    values = tuple(
        float(round(value)) if whole else float(value)
        for value, whole in zip(raw, program.integer, strict=True)
    )
    if program.violation(values) > FEASIBLE:
        return Solution("unknown", None, bound, (), limit)
    proved = scip_status == "optimal" or limit == "gap"
    return Solution("optimal" if proved else "feasible", program.objective(values), bound, values, limit)

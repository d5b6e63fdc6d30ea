"""Objectives and constraints of a search as plain data, and the Pareto front."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from plait.core.errors import ConfigError
from plait.core.lifecycle import JobState

MINIMISE, MAXIMISE = "minimize", "maximize"
MORE_IS_BETTER = ("eval/accuracy", "throughput/tokens_per_s")  # of all other metrics less is
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_LIMIT = re.compile(r"\s*(<=|>=)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric, or a numeric config key of the job, and which way is better: "minimize" or "maximize"."""

    metric: str
    direction: str = MINIMISE

    @classmethod
    def usual(cls, metric: str) -> Objective:
        """The metric in its own direction."""
        return cls(metric, MAXIMISE if metric in MORE_IS_BETTER else MINIMISE)

    def badness(self, value: float) -> float:
        """A number that sorts the best first."""
        return value if self.direction == MINIMISE else -value

    def __str__(self) -> str:
        return f"{'lowest' if self.direction == MINIMISE else 'highest'} {self.metric}"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A limit on a metric or on a numeric config key of the job."""

    metric: str
    at_most: bool
    limit: float

    @classmethod
    def read(cls, metric: str, text: str) -> Constraint:
        """The constraint that "<= 32" or ">= 4" means.

        Raises:
            ConfigError: anything else.
        """
        found = _LIMIT.fullmatch(text)
        try:
            limit = float(found[2]) if found else math.nan
        except ValueError:
            limit = math.nan
        if found is None or not math.isfinite(limit):
            raise ConfigError(
                f"search.constraints.{metric}={text!r}",
                "A constraint is a comparison with a number: <= or >=.",
                f"Write search.constraints=\"{{{metric}: '{_likely(text)}'}}\".",
            )
        return cls(metric, found[1] == "<=", limit)

    def violation(self, value: float) -> float:
        """How far a value lies outside; 0 or less if the constraint is satisfied."""
        return value - self.limit if self.at_most else self.limit - value

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.at_most else '>='} {self.limit:g}"


def _likely(text: str) -> str:
    """The comparison that was most likely meant."""
    number, sign = _NUMBER.search(text), re.search("[<>]", text)
    return f"{'>=' if sign and sign[0] == '>' else '<='} {number[0] if number else 32}"


class Entry(Protocol):
    """A trial as far as it is compared with others."""

    @property
    def trial(self) -> int:
        """Its number."""

    @property
    def state(self) -> JobState:
        """Its state now."""

    @property
    def feasible(self) -> bool:
        """It breaks no constraint."""

    @property
    def values(self) -> tuple[float, ...]:
        """The objectives; empty if they were not measured."""


AnEntry = TypeVar("AnEntry", bound=Entry)


def best_of(entries: Iterable[AnEntry], objective: Objective) -> AnEntry | None:
    """The first of :func:`best_first`; None if there is none."""
    return min((each for each in entries if _complete(each, 1)), key=_order(objective), default=None)


def best_first(entries: Iterable[AnEntry], objective: Objective) -> list[AnEntry]:
    """Finished trials that keep every constraint, that with the best objective first, ties by number."""
    return sorted((each for each in entries if _complete(each, 1)), key=_order(objective))


def _order(objective: Objective) -> Callable[[Entry], tuple[float, int]]:
    """The one rule for what is called best: the least of these is."""
    return lambda each: (objective.badness(each.values[0]), each.trial)


def front_of(entries: Iterable[AnEntry], objectives: Sequence[Objective]) -> list[AnEntry]:
    """Finished trials that keep every constraint and that no other such trial dominates, best in the first
    objective first, ties by number."""
    complete = sorted(
        (each for each in entries if _complete(each, len(objectives))), key=lambda each: each.trial
    )
    return [complete[at] for at in pareto_front([each.values for each in complete], objectives)]


def _complete(entry: Entry, objectives: int) -> bool:
    return entry.state == JobState.FINISHED and entry.feasible and len(entry.values) == objectives


def pareto_front(points: Sequence[Sequence[float]], objectives: Sequence[Objective]) -> list[int]:
    """Indices of the points that no other point dominates, that is, matches in every objective and beats in
    one. Equal points are either all in it or all out.

    Returns:
        The best in the first objective first, ties by the next ones, then by index.
    """
    keyed = sorted(
        (tuple(each.badness(value) for each, value in zip(objectives, point, strict=True)), at)
        for at, point in enumerate(points)
    )
    # What dominates a point sorts before it, so it need only be compared with those kept so far.
    front: list[tuple[tuple[float, ...], int]] = []
    for bad, at in keyed:
        if not any(_dominates(other, bad) for other, _ in front):
            front.append((bad, at))
    return [at for _, at in front]


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))

"""The result of a benchmark: figures, each with the published figure if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings

How = Literal["measured", "simulated", "computed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a benchmark's table.

    Attributes:
        name: what it is, with the case ("16 devices", "D=4 L=2").
        ours: the value here.
        unit: of both values ("s", "%", "tokens/s").
        how: "measured" on this machine; "simulated" with a cost model; "computed" from exact
            arithmetic or a fit. A simulated figure is never shown as a measured one.
        published: the paper's value, None where it gives none.
        source: where the published value stands; "" where there is none.
        tolerance: how far ours may lie from the published value, in ``unit``; None where no claim is made.
        note: why they differ, or what is assumed.
    """

    name: str
    ours: float
    unit: str
    how: How
    published: float | None = None
    source: str = ""
    tolerance: float | None = None
    note: str = ""

    @property
    def within(self) -> bool | None:
        """Whether ours lies within the tolerance; None where no claim is made."""
        if self.published is None or self.tolerance is None:
            return None
        return abs(self.ours - self.published) <= self.tolerance


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark prints: figures, and what was assumed for them."""

    name: str
    figures: tuple[Figure, ...]
    assumptions: tuple[str, ...] = ()


# Takes the run's settings, the jobs of its search and ``bench.options``.
Benchmark = Callable[[RunSettings, Sequence[JobSpec], Mapping[str, object]], Report]

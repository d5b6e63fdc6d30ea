"""The result of a benchmark: figures, beside what a paper published or beside a baseline of the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings

How = Literal["measured", "simulated", "computed"]
Sense = Literal["near", "at most", "at least"]
Result = Literal["within", "outside, explained", "outside, unexplained"]
USUAL_TOLERANCE = 0.1  # of a published value


@dataclass(frozen=True, slots=True)
class Published:
    """A paper's value for a figure.

    Attributes:
        value: in the figure's unit.
        source: where it stands.
        tolerance: how far ours may lie from it, in that unit; None: a tenth of it.
        sense: whether ours is to be near it, or at most or at least so much: seconds of another machine.
        why: what explains a difference beyond the tolerance: something that was tried.
        explained: whether ``why`` explains all of it.

    Raises:
        ConfigError: 0 without a tolerance.
    """

    value: float
    source: str
    tolerance: float | None = None
    sense: Sense = "near"
    why: str = ""
    explained: bool = True

    def __post_init__(self) -> None:
        if self.value == 0 and self.tolerance is None:
            raise ConfigError("a published value of 0", "It needs a tolerance: a tenth of 0 allows nothing.")

    @property
    def relative(self) -> bool:
        """Whether differences from it are shares of it; else they are in the figure's unit."""
        return self.tolerance is None

    def difference(self, ours: float) -> float:
        """How far ours lies from it."""
        return ours / self.value - 1.0 if self.relative else ours - self.value

    def within(self, ours: float) -> bool:
        """Whether ours lies within the tolerance."""
        tolerance = USUAL_TOLERANCE * abs(self.value) if self.tolerance is None else self.tolerance
        high_enough = self.sense == "at most" or ours - self.value >= -tolerance
        return high_enough and (self.sense == "at least" or ours - self.value <= tolerance)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a figure is compared with if no paper has it: the same quantity another way, in the same run.

    Attributes:
        value: in the figure's unit.
        name: what it is.
        ratio: ours over it, if that is not the quotient of the two (a median of quotients).
        at_most, at_least: limits of the ratio; None: no claim is made.
        why: what explains a ratio beyond them.
    """

    value: float
    name: str
    ratio: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    why: str = ""

    @property
    def explained(self) -> bool:
        """As for a published value."""
        return bool(self.why)

    def difference(self, ours: float) -> float:
        """The ratio; of two zeros 1."""
        if self.ratio is not None:
            return self.ratio
        return ours / self.value if self.value else 1.0 if ours == 0 else float("inf")

    def within(self, ours: float) -> bool | None:
        """Whether the ratio keeps its limits; None if there are none."""
        if self.at_most is None and self.at_least is None:
            return None
        ratio = self.difference(ours)
        return (self.at_most is None or ratio <= self.at_most) and (
            self.at_least is None or ratio >= self.at_least
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a benchmark's table.

    Attributes:
        name: what it is, with the case ("16 devices", "D=4 L=2").
        ours: the value here.
        unit: of all its values ("s", "%", "tokens/s").
        how: "measured" on this machine; "simulated" with a cost model; "computed" from exact
            arithmetic or a fit. A simulated figure is never shown as a measured one.
        beside: what it is compared with; None: nothing, so that it is a detail.
        note: what is assumed, or what the value consists of.
        plait: if ``ours`` is a paper's own system as Plait has it, the value of Plait's own plan.
        detail: shown only on request although it is compared: a row of a sensitivity analysis.
    """

    name: str
    ours: float
    unit: str
    how: How
    beside: Published | Baseline | None = None
    note: str = ""
    plait: float | None = None
    detail: bool = False

    @property
    def headline(self) -> bool:
        """Whether it belongs to the table that is shown first."""
        return self.beside is not None and not self.detail

    @property
    def within(self) -> bool | None:
        """Whether ours lies where it is to lie; None where no claim is made."""
        return None if self.beside is None else self.beside.within(self.ours)

    @property
    def result(self) -> Result | None:
        """The comparison in words; None if no claim is made."""
        if self.beside is None or self.within is None:
            return None
        if self.within:
            return "within"
        return "outside, explained" if self.beside.why and self.beside.explained else "outside, unexplained"

    def mapping(self) -> dict[str, Any]:
        """For JSON."""
        compared = None if self.beside is None else {
            "kind": type(self.beside).__name__.lower(),
            **asdict(self.beside),
            "difference": self.beside.difference(self.ours),
        }  # fmt: skip
        return asdict(self) | {"beside": compared, "headline": self.headline, "result": self.result}


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark prints: figures, and what was assumed for them."""

    name: str
    figures: tuple[Figure, ...]
    assumptions: tuple[str, ...] = ()


# Takes the run's settings, the jobs of its search and ``bench.options``.
Benchmark = Callable[[RunSettings, Sequence[JobSpec], Mapping[str, object]], Report]

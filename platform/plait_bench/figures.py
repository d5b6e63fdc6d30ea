"""The result of a benchmark: figures, compared with a paper's or with a baseline measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings

How = Literal["measured", "simulated", "computed"]
Sense = Literal["near", "at most", "at least"]
# Why meeting a published value is no evidence: the cost model was fitted to it; an assumption that the paper
# leaves open was chosen knowing it, or decides the result; it is the paper's own formula, not a measurement;
# ours cannot lie on its other side; or it is of another workload.
Weak = Literal["fitted", "assumed", "formula", "one-sided", "other workload", "small effect"]
WEAK: tuple[Weak, ...] = get_args(Weak)
Result = Literal["within", "outside, explained", "outside, unexplained"] | Weak
USUAL_TOLERANCE = 0.1  # of a published value


@dataclass(frozen=True, slots=True)
class Published:
    """A paper's value for a figure.

    Attributes:
        value: in the figure's unit.
        source: where it was published.
        tolerance: how far our value may be from it, in that unit; None: a tenth of it.
        sense: whether our value should be near it, at most it or at least it (seconds of another machine).
        why: what was tried about a difference beyond the tolerance.
        weak: why meeting it is no evidence; None: it is.
        others: our values under other assumptions, which were run.

    Raises:
        ConfigError: the value is 0 and there is no tolerance.
    """

    value: float
    source: str
    tolerance: float | None = None
    sense: Sense = "near"
    why: str = ""
    weak: Weak | None = None
    others: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.value == 0 and self.tolerance is None:
            raise ConfigError("a published value of 0", "It needs a tolerance: a tenth of 0 allows nothing.")

    @property
    def relative(self) -> bool:
        """Whether differences are given relative to it; otherwise they are in the figure's unit."""
        return self.tolerance is None

    def difference(self, ours: float) -> float:
        """How far our value is from it."""
        return ours / self.value - 1.0 if self.relative else ours - self.value

    def within(self, ours: float) -> bool:
        """Whether our value is within the tolerance."""
        tolerance = USUAL_TOLERANCE * abs(self.value) if self.tolerance is None else self.tolerance
        high_enough = self.sense == "at most" or ours - self.value >= -tolerance
        return high_enough and (self.sense == "at least" or ours - self.value <= tolerance)

    @property
    def explained(self) -> bool:
        """Whether another assumption, which was run, comes within the tolerance."""
        return bool(self.why) and any(map(self.within, self.others))

    def weakness(self, ours: float) -> Weak | None:
        """Why our value is no evidence; None if it is.

        A value that is within, but not under every assumption that was tried, is not.
        """
        if self.weak is None and self.within(ours) and not all(map(self.within, self.others)):
            return "assumed"
        return self.weak


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a figure is compared with if no paper has it: the same quantity, obtained otherwise in the same
    run.

    Attributes:
        value: in the figure's unit.
        name: what it is.
        ratio: our value over it, if that is not simply their quotient (for example a median of quotients).
        at_most, at_least: limits of the ratio; None: nothing is claimed.
        why: what is known of a ratio beyond them.
    """

    value: float
    name: str
    ratio: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    why: str = ""

    @property
    def explained(self) -> bool:
        """False: it has no other assumption that was run and meets it."""
        return False

    def weakness(self, _ours: float) -> Weak | None:
        """None: what is obtained in the same run is not known before."""
        return None

    def difference(self, ours: float) -> float:
        """The ratio; 1 if both are zero."""
        if self.ratio is not None:
            return self.ratio
        return ours / self.value if self.value else 1.0 if ours == 0 else float("inf")

    def within(self, ours: float) -> bool | None:
        """Whether the ratio is within its limits; None if it has none."""
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
        name: what it is, and of which case ("16 devices", "D=4 L=2").
        ours: our value.
        unit: of all its values ("s", "%", "tokens/s").
        how: "measured" on this machine; "simulated" with a cost model; "computed" from exact
            arithmetic or a fit. A simulated figure is never shown as a measured one.
        target: a published or measured value; None: nothing, so it is a detail.
        note: what is assumed, or what the value consists of.
        plait: the value of Plait's own plan, if ``ours`` is that of a paper's system as rebuilt in Plait.
        detail: whether it is shown only on request although it is compared, as in a sensitivity analysis.
    """

    name: str
    ours: float
    unit: str
    how: How
    target: Published | Baseline | None = None
    note: str = ""
    plait: float | None = None
    detail: bool = False

    @property
    def headline(self) -> bool:
        """Whether it belongs to the table that is shown first."""
        return self.target is not None and not self.detail

    @property
    def within(self) -> bool | None:
        """Whether ours lies where it is to lie; None where no claim is made."""
        return None if self.target is None else self.target.within(self.ours)

    @property
    def result(self) -> Result | None:
        """The comparison in words; None if nothing is claimed."""
        if self.target is None or self.within is None:
            return None
        if weakness := self.target.weakness(self.ours):
            return weakness
        if self.within:
            return "within"
        return "outside, explained" if self.target.explained else "outside, unexplained"

    def mapping(self) -> dict[str, Any]:
        """The figure as a mapping, for JSON."""
        compared = None if self.target is None else {
            "kind": type(self.target).__name__.lower(),
            **asdict(self.target),
            "difference": self.target.difference(self.ours),
        }  # fmt: skip
        return asdict(self) | {"target": compared, "headline": self.headline, "result": self.result}


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark prints: figures and the assumptions behind them."""

    name: str
    figures: tuple[Figure, ...]
    assumptions: tuple[str, ...] = ()


# Takes the run's settings, the jobs of its search and ``bench.options``.
Benchmark = Callable[[RunSettings, Sequence[JobSpec], Mapping[str, object]], Report]

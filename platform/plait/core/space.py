"""The search space as plain data: which config keys are searched, and what each may be.

Values are what Optuna stores (a list is stored as text, as Optuna asks for); ``Dimension.override`` turns
one back into the override that a configuration is composed with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from plait.core.errors import SearchError

Value = None | bool | int | float | str
Values = Mapping[str, Value]
Point = tuple[float, ...]  # the index of each key's value among its values, or the value itself


def as_written(value: object) -> str:
    """A value as written on the command line: true, null, [a,b]."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(as_written(item) for item in value)}]"
    return repr(value) if isinstance(value, float) else str(value)


def as_given(value: object) -> str:
    """A value as an error shows it: text in quotes, so that blanks are seen, all else as written."""
    return repr(value) if isinstance(value, str) else as_written(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """Unordered values; ``texts`` are the same values as override text."""

    values: tuple[Value, ...]
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if len({(type(value), value) for value in self.values}) < len(self.values):
            raise SearchError(str(self), "Each value may be given only once.", "Remove the duplicate.")
        if any(isinstance(value, float) and math.isnan(value) for value in self.values):
            raise SearchError(
                str(self), "nan is not a number, so no adapter can be trained with it.", "Leave it out."
            )

    def __str__(self) -> str:
        return f"choice({','.join(self.texts)})"

    @property
    def probes(self) -> tuple[Value, ...]:
        """Values that represent all of them: here, every one."""
        return self.values

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.values)

    def at(self, place: int) -> Value:
        """The value in this place."""
        return self.values[place]

    def place(self, value: Value) -> int | None:
        """Where a value stands among them; None if it does not."""
        known = ((type(each), each) for each in self.values)
        return next((at for at, each in enumerate(known) if each == (type(value), value)), None)


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers low, low + step, ..., high, both ends included."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def __post_init__(self) -> None:
        _check_bounds(str(self), self.low, self.high, self.log)
        if self.log and self.step != 1:
            raise SearchError(str(self), "A log scale needs a step of 1.", "Leave out the step or the tag.")

    def __str__(self) -> str:
        inner = f"interval({self.low},{self.high})"
        if self.step != 1:  # Hydra's range leaves out its stop
            inner = f"range({self.low},{self.high + self.step},{self.step})"
        return f"tag(log,{inner})" if self.log else inner

    @property
    def probes(self) -> tuple[Value, ...]:
        """Both ends."""
        return (self.low, self.high) if self.low < self.high else (self.low,)

    @property
    def count(self) -> int:
        """How many values there are."""
        return (self.high - self.low) // self.step + 1

    def at(self, place: int) -> Value:
        """The value in this place."""
        return self.low + place * self.step

    def place(self, value: Value) -> int | None:
        """Where a value stands among them; None if it does not."""
        if not isinstance(value, int) or not self.low <= value <= self.high:
            return None
        place, rest = divmod(value - self.low, self.step)
        return None if rest else place


@dataclass(frozen=True, slots=True)
class Real:
    """Numbers from low to high; with a step: low, low + step, ..., high."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def __post_init__(self) -> None:
        _check_bounds(str(self), self.low, self.high, self.log)
        if self.log and self.step is not None:
            raise SearchError(
                str(self),
                "An interval on a log scale cannot have a step.",
                "Use tag(log,interval(low,high)).",
            )

    def __str__(self) -> str:
        inner = f"interval({self.low!r},{self.high!r})"
        if self.step is not None:
            stop = float(_exact(self.high) + _exact(self.step))
            inner = f"range({self.low!r},{stop!r},{self.step!r})"
        return f"tag(log,{inner})" if self.log else inner

    @property
    def probes(self) -> tuple[Value, ...]:
        """Both ends."""
        return (self.low, self.high) if self.low < self.high else (self.low,)

    @property
    def count(self) -> int | None:
        """How many values there are; None if they cannot be counted."""
        if self.low == self.high:
            return 1
        if self.step is None:
            return None
        return int((_exact(self.high) - _exact(self.low)) // _exact(self.step)) + 1

    def at(self, place: int) -> Value:
        """The value in this place; the low end where they cannot be counted."""
        return self.low if self.step is None else float(_exact(self.low) + place * _exact(self.step))

    def place(self, value: Value) -> float | None:
        """Where a value stands among them, or the value itself if they cannot be counted; None if it
        lies outside."""
        if not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return None
        if self.count is None:
            return float(value)
        return 0 if self.step is None else round((value - self.low) / self.step)


def _exact(number: float) -> Fraction:
    """The number as it is written, so that three steps of 0.1 are 0.3. A Decimal would do so only as
    long as nothing in the process lowers its precision."""
    return Fraction(str(number))


def _check_bounds(text: str, low: float, high: float, log: bool) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise SearchError(text, "Both ends of an interval must be finite.", "Use finite numbers.")
    if low > high:
        raise SearchError(text, "The lower end must not be greater than the upper end.", "Swap them.")
    if log and low <= 0:
        raise SearchError(
            text,
            "On a log scale the lower end must be greater than 0.",
            "Raise the lower end, or leave out the tag.",
        )


Domain = Choice | Whole | Real


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched config key or group. ``prefix`` is the override's own: "", "+" or "++"."""

    name: str
    domain: Domain
    prefix: str = ""

    def override(self, value: Value) -> str:
        """The override that sets this key to ``value``."""
        if isinstance(self.domain, Choice):
            for known, text in zip(self.domain.values, self.domain.texts, strict=True):
                if known == value and type(known) is type(value):
                    return f"{self.prefix}{self.name}={text}"
            raise SearchError(f"{self.name}={value!r}", f"It must come from {self.domain}.")
        return f"{self.prefix}{self.name}={value!r}"


@dataclass(frozen=True, slots=True)
class Space:
    """All searched keys, in the order in which they were given."""

    dimensions: tuple[Dimension, ...] = ()

    def overrides(self, values: Values) -> list[str]:
        """One override for each dimension."""
        return [dimension.override(values[dimension.name]) for dimension in self.dimensions]

    @property
    def size(self) -> int | None:
        """How many combinations there are; None if they cannot be counted."""
        counts = [dimension.domain.count for dimension in self.dimensions]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def point(self, values: Values) -> Point | None:
        """The point with these values; None if one is missing or lies outside."""
        if any(dimension.name not in values for dimension in self.dimensions):
            return None
        places = [dimension.domain.place(values[dimension.name]) for dimension in self.dimensions]
        found = tuple(place for place in places if place is not None)
        return found if len(found) == len(places) else None

    def describe(self) -> dict[str, str]:
        """Key to domain as text: what identifies the space."""
        return {dimension.name: str(dimension.domain) for dimension in self.dimensions}

    def probes(self) -> Iterator[dict[str, Value]]:
        """Points that together hold every choice and both ends of every range at least once."""
        columns = [dimension.domain.probes for dimension in self.dimensions]
        for row in itertools.islice(itertools.count(), max(map(len, columns), default=0)):
            yield {
                dimension.name: column[min(row, len(column) - 1)]
                for dimension, column in zip(self.dimensions, columns, strict=True)
            }

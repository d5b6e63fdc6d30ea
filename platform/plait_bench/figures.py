"""One benchmark figure beside the published one, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

How = Literal["measured", "simulated", "computed"]
HEADINGS = ("figure", "ours", "unit", "how", "published", "may differ by", "source", "note")
ALWAYS = 4  # the first headings; the others only where some figure fills them


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

    def table(self) -> Table:
        """The figures as a table for the terminal."""
        table = Table(title=self.name, caption="\n".join(self.assumptions) or None)
        rows = [_cells(figure) for figure in self.figures]
        shown = [at for at in range(len(HEADINGS)) if at < ALWAYS or any(row[at] for row in rows)]
        for at in shown:
            table.add_column(
                HEADINGS[at], justify="right" if HEADINGS[at] in ("ours", "published") else "left"
            )
        for row in rows:
            table.add_row(*(row[at] for at in shown))
        return table


def _cells(figure: Figure) -> Sequence[str]:
    published = "" if figure.published is None else f"{figure.published:,.6g}"
    differs = ""
    if figure.within is not None:
        differs = f"{figure.tolerance:,.6g}: {'within' if figure.within else 'outside'}"
    return (
        figure.name,
        f"{figure.ours:,.6g}",
        figure.unit,
        figure.how,
        published,
        differs,
        figure.source,
        figure.note,
    )

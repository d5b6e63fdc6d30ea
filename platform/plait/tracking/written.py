"""Which points are written already: a step that is trained a second time is not written a second time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plait.tracking.encoding import Held, Line, Taken
from plait.tracking.operations import LogPoints


class Written:
    """The last step of every metric of every run, points that came late, and points that are held back.

    A run's points are written in the order of their steps, so that the last step says which are there.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[str, int]] = {}
        self._late: dict[str, set[int]] = {}
        self._held: dict[str, Held] = {}

    def add(self, line: Line) -> None:
        """Take note of a line of a spool."""
        match line:
            case LogPoints(late=True):
                self._late.setdefault(line.run, set()).add(line.step)
            case LogPoints():
                last = self._last.setdefault(line.run, {})
                for key, _ in line.values:
                    last[key] = line.step
            case Held():
                self._held[line.run] = line
            case Taken():
                mine = self._last.setdefault(line.run, {})
                for key, step in line.last.items():
                    mine[key] = max(step, mine.get(key, step))
                self._late.setdefault(line.run, set()).update(line.late)

    def new(self, point: LogPoints) -> LogPoints | None:
        """The point with those of its values that are not there yet; None where all are."""
        if point.late:
            return None if point.step in self._late.get(point.run, ()) else point
        last = self._last.get(point.run)
        if last is None:
            return point
        step = point.step
        values = tuple(pair for pair in point.values if step > last.get(pair[0], -1))
        return replace(point, values=values) if values else None

    def last(self, run: str, metric: str) -> int | None:
        """The last step of a metric of a run; None where there is none."""
        return self._last.get(run, {}).get(metric)

    def held(self, run: str) -> Held | None:
        """What was held back of a run when this was last noted."""
        return self._held.get(run)

    def lines(self) -> Iterator[Taken | Held]:
        """Lines that tell another file all of this."""
        for run in self._last.keys() | self._late.keys():
            yield Taken(run, self._last.get(run, {}), tuple(sorted(self._late.get(run, ()))))
        yield from self._held.values()

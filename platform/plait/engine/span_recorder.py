"""Records what a process does, so that every second of it is in exactly one span."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from plait.core.plans import Microbatch
from plait.core.spans import Span, SpanKind

Work = tuple[tuple[str, int], ...]  # jobs, each with its optimiser step

MOST_KEPT = 10_000  # newest spans, where no one takes them


@dataclass(frozen=True, slots=True)
class Part:
    """Work of a device, and its seconds."""

    kind: SpanKind
    work: Work
    seconds: float
    tokens: int = 0


class SpanRecorder:
    """The spans of a process: each begins where the one before ended, so none overlap and none is missing.

    Args:
        clock: seconds, rising; the same for all of the process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._spans: deque[Span] = deque(maxlen=MOST_KEPT)
        self._last = clock()
        self._depth = 0
        self._lapped = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a command: before it the process waited. Inside another one it changes nothing."""
        if self._depth == 0:
            self.lap("waiting")
            self._lapped = False
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and not self._lapped:
                self.lap("other")

    def lap(self, kind: SpanKind, work: Work = (), *, tokens: int = 0) -> None:
        """What the process did since the last call ends now."""
        start, self._last = self._last, self.clock()
        self._spans.append(Span(kind, start, self._last, work, tokens))
        self._lapped = True

    def share(self, parts: Sequence[Part], *, end: float | None = None) -> None:
        """What the process did since the last call, until now or then, were these, one after the other; they
        are known only now.

        The host asks a device for all of them before it waits, so its own times say nothing of each.
        """
        whole, begun, start = sum(part.seconds for part in parts), 0.0, self._last
        now = self.clock() if end is None else max(start, end)
        for number, part in enumerate(parts, start=1):
            begun += part.seconds
            share = begun / whole if whole > 0 else number / len(parts)
            until = now if number == len(parts) else start + (now - start) * share
            self._spans.append(Span(part.kind, self._last, until, part.work, part.tokens))
            self._last, self._lapped = until, True

    def add_beside(self, start: float, work: Work, received: int) -> None:
        """A thread beside the process's own exchanged this work from ``start`` until now; ``received``:
        bytes."""
        self._spans.append(Span("exchange", start, self.clock(), work, bytes=received, overlapping=True))

    def take(self) -> tuple[Span, ...]:
        """The spans since the last call."""
        return tuple(self._spans.popleft() for _ in range(len(self._spans)))


def work_of(microbatch: Microbatch) -> Work:
    """The jobs of a microbatch, each with its optimiser step."""
    return tuple((each.job, each.step) for each in microbatch.segments)

"""What replicas do, and when: spans by a process's own clock, and what those of an iteration add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SpanKind = Literal[
    "waiting",
    "load",
    "attach",
    "microbatch",
    "exchange",
    "step",
    "evaluation",
    "generation",
    "checkpoint",
    "adapter",
    "other",
]


@dataclass(frozen=True, slots=True)
class Span:
    """What a process did between two times of its clock.

    Attributes:
        kind: in "waiting" it has nothing to do: it waits for a command, or for other processes.
        start, end: seconds of the process's own clock, rising.
        work: jobs, each with its optimiser step.
        tokens: real tokens that went through the model.
        bytes: received from other processes.
        overlapping: in a thread of its own, while the process did what other spans say.
    """

    kind: SpanKind
    start: float
    end: float
    work: tuple[tuple[str, int], ...] = ()
    tokens: int = 0
    bytes: int = 0
    overlapping: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ReplicaSpans:
    """Spans of one replica in order; each begins where the one before ended, but for those beside them.

    Attributes:
        replica: number of its process, as it was launched.
        offset: seconds to add to its times for those of the coordinator's clock.
        error: by how many seconds that may be wrong, at most.
    """

    replica: int
    host: str
    pid: int
    device: str
    spans: tuple[Span, ...]
    offset: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaTime:
    """What one replica did in an iteration of a group.

    Attributes:
        busy_seconds, waited_seconds: add up to the iteration's seconds.
        tokens: real tokens that it trained on.
        received_bytes: sums of gradients that it had from the other processes.
        predicted_busy_seconds, predicted_waited_seconds: expected before it ran; None where nothing was.
        peak_bytes: most that its microbatches took, weights and adapters included; None if not observed.
        predicted_bytes: the same, expected before it ran.
    """

    replica: int
    busy_seconds: float
    waited_seconds: float
    tokens: int
    received_bytes: int
    predicted_busy_seconds: float | None = None
    predicted_waited_seconds: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None

    @property
    def waited_share(self) -> float | None:
        """Share of the iteration in which it waited; of a stage, its bubble."""
        return _share(self.waited_seconds, self.busy_seconds)

    @property
    def predicted_waited_share(self) -> float | None:
        """The same, expected before it ran."""
        if self.predicted_busy_seconds is None or self.predicted_waited_seconds is None:
            return None
        return _share(self.predicted_waited_seconds, self.predicted_busy_seconds)


def _share(waited: float, busy: float) -> float | None:
    return waited / (waited + busy) if waited + busy > 0 else None


@dataclass(frozen=True, slots=True)
class ReplicaTotals:
    """What one replica has done so far."""

    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    tokens: int = 0
    received_bytes: int = 0

    def with_spans(self, spans: Iterable[Span]) -> ReplicaTotals:
        """These and what was done in further spans."""
        busy, waited, tokens = self.busy_seconds, self.waited_seconds, self.tokens
        received = self.received_bytes
        for span in spans:
            received += span.bytes
            if span.kind == "microbatch":
                tokens += span.tokens
            if span.kind == "waiting":
                waited += span.seconds
            elif not span.overlapping:
                busy += span.seconds
        return ReplicaTotals(busy, waited, tokens, received)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """How one process of a run is doing now.

    Attributes:
        replica: its number, as it was launched.
        doing: what it was asked to do, in words; "" while it waits for a command.
        seconds: since it was asked, or has waited.
        silent: seconds without a sign of life while it does something.
        limit: seconds of silence after which it counts as dead.
    """

    replica: int
    host: str
    pid: int
    device: str
    doing: str
    seconds: float
    silent: float
    limit: float

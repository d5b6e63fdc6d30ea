"""What comes after a job's last step: its answers are judged, and its adapter is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import StorageError
from plait.core.messages import Command, Event, Export, Generate, GenerateJob, JobGenerated, Notice
from plait.engine.catalogue import DataCatalogue
from plait.engine.ledger import Outcome
from plait.engine.live import LiveJob

RETRY_SECONDS = 10.0  # until an adapter that could not be written is tried again
SPENT = "budget spent"


@dataclass(slots=True)
class _After:
    """Of a job whose budget is spent: why its answers were not judged, and when its adapter could not be
    written last."""

    unjudged: str = ""
    failed: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A job whose adapter is whole on disk, and what is to be said of its end."""

    job: LiveJob
    adapter: Path
    reason: str


class Finishing:
    """Finishes jobs whose budget is spent.

    Args:
        data: whose verifiers judge answers.
        folder: for adapters, one folder each.
        send: carries a command out.
        clock: seconds, rising.
        patient: whether a job waits, on the worker, for a disk that cannot take its adapter.
    """

    def __init__(
        self,
        data: DataCatalogue,
        folder: Path,
        send: Callable[[Command], Outcome],
        clock: Callable[[], float],
        *,
        patient: bool,
    ) -> None:
        self._data = data
        self._folder = folder
        self._send = send
        self._clock = clock
        self._patient = patient
        self._after: dict[str, _After] = {}

    def left(self, job: str) -> None:
        """A job is over."""
        self._after.pop(job, None)

    def finish(self, done: Sequence[LiveJob]) -> tuple[list[Event], list[Finished]]:
        """Generate with and export jobs that have taken all their steps.

        Raises:
            StorageError: an adapter cannot be written, and nobody wants to wait until it can.
        """
        events = self._judge([job for job in done if job.name not in self._after])
        finished = []
        for job in done:
            after = self._after[job.name]
            if after.failed is not None and self._clock() - after.failed < RETRY_SECONDS:
                continue
            adapter = self._folder / job.name
            try:
                self._send(Export(job.name, adapter, job.cursor.best_step))
            except StorageError as error:
                if not self._patient:
                    raise
                if after.failed is None:
                    events.append(Notice(_waits(job.name, error.value)))
                after.failed = self._clock()
            else:
                if after.failed is not None:
                    events.append(Notice(f"{job.name}: its adapter is written now"))
                reason = (
                    f"{SPENT}; its answers were not judged: {after.unjudged}" if after.unjudged else SPENT
                )
                finished.append(Finished(job, adapter, reason))
        return events, finished

    def _judge(self, jobs: Sequence[LiveJob]) -> list[Event]:
        """Answers to the validation prompts of every job that asks for them, together, judged."""
        self._after |= {job.name: _After() for job in jobs}
        asking: dict[int, list[LiveJob]] = {}
        for job in jobs:
            limit = self._data.generation_limit(job.spec.data)
            if limit is not None and len(job.data.validation) > 0:
                asking.setdefault(limit, []).append(job)
        events: list[Event] = []
        for limit, group in asking.items():
            wanted = [GenerateJob(job.name, tuple(range(len(job.data.validation)))) for job in group]
            outcome = self._send(Generate(tuple(wanted), limit))
            for job in group:
                if trouble := outcome.failures.get(job.name):
                    self._after[job.name].unjudged = trouble
                    events.append(Notice(f"{job.name}: its answers could not be generated: {trouble}"))
                    continue
                scores = self._data.scores(job.spec.data, job.data, outcome.generated[job.name])
                events.append(JobGenerated(job.name, job.step, sum(scores) / len(scores)))
        return events


def _waits(job: str, trouble: str) -> str:
    return (
        f"{job}: its adapter could not be written ({trouble}); it is tried again every "
        f"{RETRY_SECONDS:.0f} s, and the others go on"
    )

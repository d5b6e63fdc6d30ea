"""What comes after the steps of a group's iteration: validation, and the end of a job after its last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import PlaitError, StorageError
from plait.core.messages import (
    Command,
    Evaluate,
    Event,
    Export,
    Generate,
    GenerateJob,
    GroupStep,
    JobEvaluated,
    JobGenerated,
    JobProgress,
    KeepWeights,
    Notice,
    SpansTaken,
)
from plait.core.spans import ReplicaSpans, ReplicaTime
from plait.engine.catalogue import DataCatalogue
from plait.engine.jobs import LiveJob
from plait.engine.ledger import Outcome, Tally
from plait.engine.packer import Packer
from plait.engine.predictions import Expected

RETRY_SECONDS = 10.0  # delay before another attempt to write an adapter
SPENT = "budget spent"
Send = Callable[[Command], Outcome]


def evaluate(due: Sequence[LiveJob], send: Send, packer: Packer) -> tuple[list[JobEvaluated], dict[str, str]]:
    """Evaluate jobs in joint forward passes; if memory runs out, in two parts.

    Jobs that keep their best weights keep those of this evaluation if it is the best so far.

    Returns:
        The measurements, and why the other jobs failed, by name.
    """
    if not due:
        return [], {}
    outcome = send(Evaluate(packer.pack([job.validation_batch() for job in due])))
    if outcome.out_of_memory is not None:
        if len(due) == 1:
            return [], {
                due[0].name: f"out of memory while it was evaluated by itself: {outcome.out_of_memory}"
            }
        half = len(due) // 2
        first, failed = evaluate(due[:half], send, packer)
        others, failed_too = evaluate(due[half:], send, packer)
        return [*first, *others], failed | failed_too
    measured: list[JobEvaluated] = []
    best: list[str] = []
    for job in due:
        if job.name not in outcome.failures:
            tally = outcome.tallies[job.name]
            best += [job.name] if job.evaluate(tally.mean) else []
            spent = job.cursor.device_seconds
            measured.append(JobEvaluated(job.name, job.step, tally.mean, tally.tokens, spent))
    if best:
        send(KeepWeights(tuple(best)))
    return measured, outcome.failures


def answered(
    jobs: Sequence[LiveJob], send: Send, data: DataCatalogue, *, at_end: bool
) -> tuple[list[JobGenerated], dict[str, str]]:
    """Generate answers to the validation prompts of all jobs that have some together, and score them.

    Jobs that keep their most accurate weights keep those of this evaluation if it is the best so far.

    Args:
        at_end: with the weights of jobs' best evaluations, if they keep them. Otherwise with those of now,
            and only where answers are wanted at each evaluation.

    Returns:
        The accuracies, and why the other jobs have none, by name.
    """
    asking: dict[int, list[LiveJob]] = {}
    for job in jobs:
        limit = data.generation_limit(job.spec.data)
        wanted_now = at_end or data.each_evaluation(job.spec.data)
        if limit is not None and wanted_now and len(job.data.validation) > 0:
            asking.setdefault(limit, []).append(job)
    found: list[JobGenerated] = []
    failed: dict[str, str] = {}
    for limit, group in asking.items():
        wanted = [GenerateJob(job.name, tuple(range(len(job.data.validation)))) for job in group]
        outcome = send(Generate(tuple(wanted), limit, best=at_end))
        failed |= {job.name: outcome.failures[job.name] for job in group if job.name in outcome.failures}
        for job in group:
            if job.name in failed:
                continue
            try:
                scores = data.scores(job.spec.data, job.data, outcome.generated[job.name])
            except PlaitError as error:  # as of a function that the user named
                failed[job.name] = error.in_line
            else:
                accuracy, spent = sum(scores) / len(scores), job.cursor.device_seconds
                found.append(JobGenerated(job.name, job.step, accuracy, spent))
    accuracies = {} if at_end else {each.job: each.accuracy for each in found}
    best = [job.name for job in jobs if job.name in accuracies and job.answer(accuracies[job.name])]
    if best:
        send(KeepWeights(tuple(best)))
    return found, failed


@dataclass(slots=True)
class _Progress:
    """How far the finishing of a job has come.

    Attributes:
        unscored: why its answers were not scored.
        failed_at: time of the last attempt to write its adapter, if that failed.
    """

    unscored: str = ""
    failed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A job whose adapter is complete on disk, and the reason reported with its end."""

    job: LiveJob
    adapter: Path
    reason: str


class Finishing:
    """Finishes jobs whose budget is spent: scores their answers and writes their adapters."""

    def __init__(self, data: DataCatalogue, folder: Path, send: Send, clock: Callable[[], float]) -> None:
        self._data = data
        self._folder = folder
        self._send = send
        self._clock = clock
        self._progress: dict[str, _Progress] = {}

    def ended(self, job: str) -> None:
        """Forget a job."""
        self._progress.pop(job, None)

    def finish(self, done: Sequence[LiveJob]) -> tuple[list[Event], list[Finished]]:
        """Generate with and export jobs that have taken all their steps.

        A job whose adapter cannot be written stays on the worker and is tried again.
        """
        events = self._score([job for job in done if job.name not in self._progress])
        finished = []
        for job in done:
            progress = self._progress[job.name]
            if progress.failed_at is not None and self._clock() - progress.failed_at < RETRY_SECONDS:
                continue
            adapter = self._folder / job.name
            try:
                self._send(Export(job.name, adapter, job.cursor.best_step))
            except StorageError as error:
                if progress.failed_at is None:
                    events.append(Notice(_retried(job.name, error.value)))
                progress.failed_at = self._clock()
            else:
                if progress.failed_at is not None:
                    events.append(Notice(f"{job.name}: its adapter has now been written"))
                unscored = f"; its answers were not scored: {progress.unscored}" if progress.unscored else ""
                finished.append(Finished(job, adapter, SPENT + unscored))
        return events, finished

    def _score(self, jobs: Sequence[LiveJob]) -> list[Event]:
        """The accuracies of jobs' answers; a job without them is finished all the same.

        That of a job's most accurate evaluation is known: its answers were by the weights that are kept.
        """
        self._progress |= {job.name: _Progress() for job in jobs}
        known = {job.name: job.cursor.best_accuracy for job in jobs}
        asked = [job for job in jobs if known[job.name] is None]
        found, failed = answered(asked, self._send, self._data, at_end=True)
        found += [
            JobGenerated(job.name, job.step, accuracy, job.cursor.device_seconds)
            for job in jobs
            if (accuracy := known[job.name]) is not None
        ]
        for name, trouble in failed.items():
            self._progress[name].unscored = trouble
        notices = [
            Notice(f"{name}: its answers were not scored: {trouble}") for name, trouble in failed.items()
        ]
        return [*notices, *found]


def group_step(
    group: str,
    number: int,
    jobs: tuple[str, ...],
    run: Outcome,
    expected: Expected,
    seconds: float,
    capacity: int,
    replicas: tuple[ReplicaTime, ...],
) -> GroupStep:
    """The event of an iteration of a group."""
    return GroupStep(
        group=group,
        iteration=number,
        jobs=jobs,
        microbatches=run.microbatches,
        tokens=run.tokens,
        seconds=seconds,
        peak_bytes=run.peak_bytes,
        capacity=capacity,
        job_tokens=tuple(run.tallies[name].tokens for name in jobs),
        predicted_seconds=expected.seconds,
        predicted_bytes=expected.bytes,
        bytes_by_rule=expected.by_rule,
        replicas=replicas,
    )


def progress(job: LiveJob, tally: Tally, grad_norm: float, seconds: float) -> JobProgress:
    """Count a step of a job, which was taken in an iteration of ``seconds``; return its event."""
    tokens_per_s = tally.tokens / seconds if seconds > 0 else 0.0
    job.advance(tally.tokens, tally.mean, grad_norm, tokens_per_s)
    return JobProgress(
        job=job.name,
        step=job.step,
        loss=tally.mean,
        grad_norm=grad_norm,
        lr=job.rate_of(job.step),
        tokens=job.cursor.tokens,
        device_seconds=job.cursor.device_seconds,
        tokens_per_s=tokens_per_s,
    )


def _retried(job: str, trouble: str) -> str:
    return (
        f"{job}: its adapter could not be written ({trouble}); trying again every {RETRY_SECONDS:.0f} s "
        "while the others train"
    )


def traced(replicas: Sequence[ReplicaSpans]) -> list[Event]:
    """The event of what replicas did; none where none did anything but wait."""
    busy = any(span.kind != "waiting" for each in replicas for span in each.spans)
    return [SpansTaken(tuple(replicas))] if busy else []

"""Sends commands to a worker and accounts for the answers: losses, failures and device time.

Every nanosecond of the device is attributed to one job, and the sums are exact. Whole nanoseconds are used,
because sums of floating-point shares drift away from the total.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from plait.core.errors import LostProcessError
from plait.core.messages import (
    NANOSECONDS,
    Attach,
    Attached,
    Command,
    Detach,
    Evaluate,
    Export,
    Generate,
    Generated,
    JobFailed,
    KeepWeights,
    MicrobatchDone,
    ObservedPeak,
    OutOfMemory,
    RunSchedule,
    SaveCheckpoint,
    Saved,
    ScheduleDone,
    StepDone,
    WorkerEvent,
)
from plait.engine.jobs import LiveJob
from plait.engine.worker import Worker


@dataclass(slots=True)
class Tally:
    """One job's loss, summed over microbatches."""

    loss_sum: float = 0.0
    labelled: int = 0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean loss of a labelled token; 0 if there is none."""
        return self.loss_sum / self.labelled if self.labelled else 0.0


@dataclass(slots=True)
class Outcome:
    """The result of one command, by job. If it ran out of memory, only the time spent counts."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    steps: dict[str, StepDone] = field(default_factory=dict)
    attached: dict[str, Attached] = field(default_factory=dict)
    generated: dict[str, Generated] = field(default_factory=dict)
    out_of_memory: str | None = None
    schedules: list[Outcome] = field(default_factory=list)  # of a pipeline, those that are done by now
    microbatches: int = 0
    peaks: dict[int, tuple[ObservedPeak, ...]] = field(default_factory=dict)  # by microbatch: of each stage

    @property
    def peak_bytes(self) -> int | None:
        """The highest peak of any process, if every microbatch was observed."""
        found = [peak.bytes for own in self.peaks.values() for peak in own]
        known = [each for each in found if each is not None]
        if not known or len(self.peaks) < self.microbatches or len(known) < len(found):
            return None
        return max(known)

    def process_peaks(self, counts: Mapping[int, int], replicas: Mapping[int, int]) -> dict[int, int]:
        """The highest peak of each process, of those of which it is known.

        Args:
            counts: processes of each replica; replicas: that of each microbatch.
        """
        found: dict[int, int | None] = {}
        begins = [0, *accumulate(counts.values())]
        for index, peaks in self.peaks.items() if len(self.peaks) >= self.microbatches else ():
            for process, peak in enumerate(peaks, begins[replicas[index]]):
                before, size = found.get(process, 0), peak.bytes
                found[process] = None if before is None or size is None else max(before, size)
        return {process: size for process, size in found.items() if size is not None}

    @property
    def tokens(self) -> int:
        """Real tokens that went through the model."""
        return sum(tally.tokens for tally in self.tallies.values())


class Ledger:
    """Sends commands to the worker. The time of a microbatch is divided among its jobs by tokens.

    A job is charged for everything that the worker does for it, including attaching, saving and failed steps.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.device_ns = 0  # of all commands so far; the jobs' shares add up to exactly this

    def send(self, command: Command, jobs: Mapping[str, LiveJob]) -> Outcome:
        """Carry out a command and charge it to ``jobs``, which must include every job that it concerns."""
        outcome = Outcome()
        self._take(self._executed(command, jobs), command, jobs, outcome)
        return outcome

    def _take(
        self, events: Sequence[WorkerEvent], command: Command, jobs: Mapping[str, LiveJob], outcome: Outcome
    ) -> None:
        for event in events:
            match event:
                case ScheduleDone(done):
                    outcome.schedules.append(Outcome())
                    self._take(done, command, jobs, outcome.schedules[-1])
                case MicrobatchDone():
                    self._microbatch(event, jobs, outcome)
                case StepDone():
                    self._step(event, jobs, outcome)
                case Generated():
                    outcome.generated[event.job] = event
                    self.charge(jobs[event.job], event.seconds)
                case JobFailed():
                    outcome.failures.setdefault(event.job, event.reason)
                    self.charge(jobs[event.job], event.seconds)
                case Attached():
                    outcome.attached[event.job] = event
                case OutOfMemory():
                    outcome.out_of_memory = event.detail
                    self._wasted(command, event.seconds, jobs)
                case Saved():
                    self.charge(jobs[event.job], event.seconds)

    def _executed(self, command: Command, jobs: Mapping[str, LiveJob]) -> Sequence[WorkerEvent]:
        """What came of a command; the time of one whose worker is lost is charged, too."""
        try:
            return self.worker.execute(command)
        except LostProcessError as error:
            self._wasted(command, error.seconds, jobs)
            raise

    def charge(self, job: LiveJob, seconds: float) -> None:
        """Charge device time to a job."""
        spent = nanoseconds(seconds)
        self.device_ns += spent
        job.charge(spent)

    def _step(self, event: StepDone, jobs: Mapping[str, LiveJob], outcome: Outcome) -> None:
        self.charge(jobs[event.job], event.seconds)
        if math.isfinite(event.grad_norm):
            outcome.steps[event.job] = event
        else:
            outcome.failures.setdefault(event.job, f"gradient norm is {event.grad_norm}")

    def _wasted(self, command: Command, seconds: float, jobs: Mapping[str, LiveJob]) -> None:
        """Charge the time of a command that came to nothing to its jobs; for microbatches, by tokens."""
        tokens = _concerned(command)
        if not tokens:
            return
        spent = nanoseconds(seconds)
        self.device_ns += spent
        for name, part in zip(tokens, share(spent, list(tokens.values())), strict=True):
            jobs[name].charge(part)

    def _microbatch(self, event: MicrobatchDone, jobs: Mapping[str, LiveJob], outcome: Outcome) -> None:
        outcome.microbatches += 1
        if event.peaks:
            outcome.peaks[event.index] = event.peaks
        spent = nanoseconds(event.seconds)
        self.device_ns += spent
        shares = share(spent, [loss.tokens for loss in event.losses])
        for loss, part in zip(event.losses, shares, strict=True):
            jobs[loss.job].charge(part)
            tally = outcome.tallies.setdefault(loss.job, Tally())
            tally.loss_sum += loss.loss_sum
            tally.labelled += loss.labelled
            tally.tokens += loss.tokens


def _concerned(command: Command) -> Mapping[str, int]:
    """The jobs of a command with their tokens in it; 0 for those of a command without microbatches."""
    match command:
        case RunSchedule() | Evaluate():
            tokens = Counter[str]()
            for segment in (each for item in command.microbatches for each in item.segments):
                tokens[segment.job] += segment.tokens
            return tokens
        case Attach(job):
            return {job.name: 0}
        case Generate(jobs):
            return {each.job: 0 for each in jobs}
        case KeepWeights(names):
            return dict.fromkeys(names, 0)
        case Detach(name) | SaveCheckpoint(name) | Export(name):
            return {name: 0}


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * NANOSECONDS)


def share(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """``total`` split in proportion to ``weights`` (at least 0), by largest remainder; the sum is ``total``.

    Equal shares if all weights are 0. Ties go to the earlier entry.

    Raises:
        ValueError: no weights, or one of them negative.
    """
    if not weights or min(weights) < 0:
        raise ValueError(f"weights {tuple(weights)}: at least one is needed and none may be negative")
    if sum(weights) == 0:
        weights = [1] * len(weights)
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)

"""Messages between the coordinator and the workers: picklable, frozen, without tensors.

The coordinator (pure Python) decides; a worker owns the tensors (:class:`plait.engine.worker.Worker`).
Search, tracking and terminal read events only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult, PauseReason
from plait.core.plans import Microbatch
from plait.core.spans import ReplicaSpans, ReplicaTime

NANOSECONDS = 1_000_000_000

# ---- commands: coordinator to worker -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """Attach a job: fresh, or from a checkpoint.

    ``resume_from`` is a checkpoint, or a folder of which the newest complete checkpoint is taken. If there is
    none, the job begins with the weights in ``warm_from``, the folder of an adapter or a checkpoint.
    """

    job: JobSpec
    resume_from: Path | None = None
    warm_from: Path | None = None


@dataclass(frozen=True, slots=True)
class Detach:
    """Detach a job and free its tensors."""

    job: str


@dataclass(frozen=True, slots=True)
class StepJob:
    """One optimiser step of one job. ``step`` counts from 1 (Adam's bias correction); rates are as
    scheduled."""

    job: str
    step: int
    lr: float


@dataclass(frozen=True, slots=True)
class RunSchedule:
    """Microbatches, forward and backward, and optimiser steps, in this order.

    Gradients are added up in the order of the microbatches, then in that of the replicas. Steps that lie next
    to each other are one call of the optimiser; replicas add up gradients in the order of the steps. A job
    with a loss or a gradient that is not finite does not step.

    Attributes:
        order: in which the stages of a pipeline take the microbatches, by name; they step a job as soon as
            its global batch is back, wherever its step lies here.
        drained: whether all of it is done at the end. If not, a pipeline's last microbatches are still in
            flight; the next schedule continues them.
    """

    items: tuple[Microbatch | StepJob, ...]
    order: str = "plait"
    drained: bool = True

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """The microbatches of all replicas."""
        return tuple(item for item in self.items if isinstance(item, Microbatch))

    @property
    def steps(self) -> tuple[StepJob, ...]:
        """All steps."""
        return tuple(item for item in self.items if isinstance(item, StepJob))


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run forward only, without dropout, over microbatches of validation samples."""

    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class KeepWeights:
    """Keep a copy of these jobs' current weights, replacing an earlier copy; generation and export use it."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Validation samples of one job whose prompts (the tokens before the first label) are to be answered."""

    job: str
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate answers greedily, for several jobs together; ``best``: with the weights of jobs' best
    evaluations, if they keep them."""

    jobs: tuple[GenerateJob, ...]
    max_new_tokens: int
    best: bool = True


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a job has come. The data order, the rates and the dropout masks follow from ``step`` alone.

    Attributes:
        step: optimiser steps done.
        tokens: real tokens trained on.
        device_ns: device time attributed to the job, in nanoseconds.
        best_step, best_loss, best_accuracy: those of the evaluation whose weights are kept; None if none are.
            The last only where accuracies decide.
        completion_seconds: in a checkpoint: time since the job's submission, in this and earlier processes.
        loss, grad_norm, tokens_per_s: of the last step; None before it, and in checkpoints of earlier
            releases.
    """

    step: int = 0
    tokens: int = 0
    device_ns: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    best_accuracy: float | None = None
    completion_seconds: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None

    @property
    def device_seconds(self) -> float:
        """Device time attributed to the job."""
        return self.device_ns / NANOSECONDS


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write adapter, moments and cursor: all that a job needs to resume."""

    job: str
    directory: Path
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Export:
    """Write the adapter as a PEFT folder, with the weights kept after ``kept_step`` steps, else the last
    ones."""

    job: str
    directory: Path
    kept_step: int | None = None


Command = Attach | Detach | RunSchedule | Evaluate | KeepWeights | Generate | SaveCheckpoint | Export

# ---- events: worker to coordinator, and on to search, tracking and terminal --------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """A job is attached at ``cursor``, which is the start for a fresh one.

    ``checkpoint`` is the folder that it was read from; ``notices`` say what was wrong with newer checkpoints.
    """

    job: str
    cursor: Cursor
    checkpoint: Path | None = None
    notices: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobLoss:
    """A job's loss in one microbatch: the unweighted sum over its labelled tokens."""

    job: str
    step: int
    loss_sum: float
    labelled: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ObservedPeak:
    """The memory that a microbatch used.

    Attributes:
        static: bytes of tensors that exist before and after it: weights and all attached adapters.
        phases: peak bytes, static ones included, by phase of the microbatch (forward, loss, backward; of a
            stage also what it keeps between these).
        beside: by how much the highest moment was above that, for other microbatches in flight; None: not
            all of these were counted.
    """

    static: int
    phases: tuple[tuple[str, int], ...]
    beside: int | None = 0

    @property
    def bytes(self) -> int | None:
        """The highest that there was; None if that is not known."""
        return None if self.beside is None else self.beside + max(highest for _, highest in self.phases)


@dataclass(frozen=True, slots=True)
class MicrobatchDone:
    """One microbatch is done; ``peaks`` are those of each stage, if it was observed."""

    index: int
    losses: tuple[JobLoss, ...]
    seconds: float
    peaks: tuple[ObservedPeak, ...] = ()
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class StepDone:
    """A job's optimiser stepped, with the gradient's norm before clipping; one that is not finite says that
    it did not step."""

    job: str
    step: int
    grad_norm: float
    seconds: float


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A loss or gradient was not finite, the job's data or checkpoint cannot be used, or one of its answers
    does not fit into memory. The other jobs continue.

    ``seconds`` are those that no other event has: of attaching the job, or of generating.
    """

    job: str
    step: int
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Generated:
    """Generated texts, in the order of the requested samples."""

    job: str
    samples: tuple[int, ...]
    texts: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint or an exported adapter is complete on disk."""

    job: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A command ran out of memory part of the way. None of the steps after it was taken, on any replica, and
    all gradients are zero again; nothing is left of a job that was to be attached.

    ``seconds`` are those of the microbatch or job that failed.
    """

    detail: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ScheduleDone:
    """All of a schedule is done on one stage of a pipeline; schedules end in the order in which they came."""

    events: tuple[WorkerEvent, ...]


WorkerEvent = (
    ScheduleDone | Attached | MicrobatchDone | StepDone | JobFailed | Generated | Saved | OutOfMemory
)

# ---- events of the coordinator: what happened to a job as a whole -------------------------------------


@dataclass(frozen=True, slots=True)
class JobAdmitted:
    """A job left the queue and trains from ``step`` (0: fresh), which is its ``cursor``'s."""

    job: JobSpec
    step: int
    steps: int
    group: str
    cursor: Cursor = Cursor()


@dataclass(frozen=True, slots=True)
class JobPaused:
    """A job left its slot with a checkpoint of ``step`` steps; another :class:`JobAdmitted` follows when it
    resumes. ``tokens`` and ``device_seconds`` are the job's totals so far."""

    job: str
    step: int
    reason: PauseReason
    tokens: int = 0
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobReleased:
    """A job that was paused at its rung may continue as soon as a slot is free: the search's own event."""

    job: str


@dataclass(frozen=True, slots=True)
class JobProgress:
    """One optimiser step of one job, complete.

    Attributes:
        loss: mean over the labelled tokens of the global batch.
        tokens: real tokens of the job so far.
        device_seconds: the job's total so far; a microbatch's seconds are divided among its jobs by tokens.
        tokens_per_s: real tokens of this step divided by the seconds that the group took for it.
    """

    job: str
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    device_seconds: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class JobEvaluated:
    """Validation loss after ``step`` optimiser steps: the mean over the labelled tokens of the whole split.
    ``device_seconds``: the job's total so far, with this evaluation."""

    job: str
    step: int
    loss: float
    tokens: int
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobGenerated:
    """Mean of the verifier's scores of the generated answers: 1 is right, less is partly right or wrong.
    ``device_seconds``: the job's total so far, with these answers."""

    job: str
    step: int
    accuracy: float
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the user should know. No job ends because of it."""

    text: str


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One iteration of a group.

    Attributes:
        iteration: its number in this process, from 1.
        tokens: real tokens of all jobs.
        peak_bytes: highest peak of its microbatches; None if the device cannot tell.
        job_tokens: real tokens of each job, in the order of ``jobs``.
        predicted_seconds: prediction made before it ran; None if nothing is known yet.
        predicted_bytes: the same for the peak.
        bytes_by_rule: whether that is an upper bound from the model's shape, because nothing was observed
            yet.
        replicas: what each replica did in this iteration, by its number.
    """

    group: str
    iteration: int
    jobs: tuple[str, ...]
    microbatches: int
    tokens: int
    seconds: float
    peak_bytes: int | None
    capacity: int
    job_tokens: tuple[int, ...] = ()
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    bytes_by_rule: bool = False
    replicas: tuple[ReplicaTime, ...] = ()


@dataclass(frozen=True, slots=True)
class SpansTaken:
    """What the replicas did since the event of this kind before, by the coordinator's clock."""

    replicas: tuple[ReplicaSpans, ...]


@dataclass(frozen=True, slots=True)
class ModelFitted:
    """The time or memory model was fitted to the observations so far.

    Attributes:
        target: "seconds" of an iteration, or "bytes" of a microbatch's peak above the static ones.
        iteration: the iteration after which it was fitted; counted as in :class:`GroupStep`.
        coefficients: by name; those of memory by phase and name.
        mean_error, max_error: absolute relative errors of the observations that it was fitted to.
        ahead_error: mean absolute relative error of the predictions made since the previous fit; None if
            nothing was predicted.
        margin: by how much a new observation may exceed its prediction, relative.
    """

    target: str
    iteration: int
    observations: int
    coefficients: tuple[tuple[str, float], ...]
    mean_error: float
    max_error: float
    ahead_error: float | None
    margin: float


Event = (
    JobAdmitted
    | JobPaused
    | JobReleased
    | JobProgress
    | JobEvaluated
    | JobGenerated
    | JobResult
    | Notice
    | GroupStep
    | SpansTaken
    | ModelFitted
)

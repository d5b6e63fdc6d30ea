"""The result of `plait plan`, as plain data. A value that cannot be predicted from a measurement is None,
never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.simulate.report import Bubble


@dataclass(frozen=True, slots=True)
class GroupOutlook:
    """Jobs that train together.

    Attributes:
        wave: its wave, from 1; jobs of a wave start when the previous wave is done.
        microbatches: number of microbatches, over the whole budget, in which its jobs have samples.
        predicted_seconds: seconds from the start of its wave to the group's last step.
        predicted_bytes: peak bytes on one device while it trains, with weights and everything else.
    """

    wave: int
    jobs: tuple[str, ...]
    steps: int
    microbatches: int
    predicted_seconds: float | None = None
    device_seconds: float | None = None
    predicted_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaOutlook:
    """Replicas of one kind.

    Attributes:
        predicted_bytes: peak bytes on one device, weights included.
        bytes_source: what they are predicted from; "" if nothing is predicted.
        kind: kind of device, if there are several.
        sharded: whether they share the weights of one base model's layers.
    """

    tp: int
    pp: int
    count: int
    capacity: int
    layer_split: tuple[int, ...] = ()
    predicted_bytes: int | None = None
    bytes_source: str = ""
    kind: str = ""
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class ProcessOutlook:
    """One of several processes on this machine.

    Attributes:
        predicted_bytes: its peak, with weights and everything else.
        tokens: real tokens of its microbatches, over the whole budget.
        busy_seconds: seconds of its microbatches.
        waiting_share: share of the search's seconds in which it waits for others.
    """

    process: int
    device: str
    capacity: int
    predicted_bytes: int
    tokens: int
    busy_seconds: float | None = None
    waiting_share: float | None = None


@dataclass(frozen=True, slots=True)
class CandidateOutlook:
    """Replicas that this machine's processes, or a cluster's devices, could make.

    Attributes:
        jobs: of those that may train at once, how many fit; 0: none does.
        predicted_bytes: peak of the fullest process or device with these.
        step_seconds: of one step of each job that may train at once.
        why: why it is not chosen; "" if it is.
    """

    replicas: str
    jobs: int
    predicted_bytes: int | None
    step_seconds: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class TrialOutlook:
    """One trial.

    Attributes:
        values: values of the config keys that differ between trials.
        replicas: share of its tokens that each kind of replica trains; empty on one device.
    """

    trial: str
    wave: int
    values: Mapping[str, Any]
    replicas: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectiveOutlook:
    """The objective by which devices were chosen among the available ones.

    Attributes:
        available: number of devices of the cluster.
        slack: share of the objective that may be given up for time or, if that is the objective, for cost.
        value: the objective of the first wave's mean step.
        bound: proved lower bound of the value for all numbers of devices.
        gap: relative distance of the value to the bound; 0 if both are 0, because devices are free.
    """

    objective: str
    available: str
    slack: float
    value: float
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class DevicesOutlook:
    """The search on a given number of devices.

    Attributes:
        refused: why the search cannot run on them; "" if it can.
        error: error of the predicted seconds, as in :class:`Outlook`, but on these devices.
    """

    devices: str
    chosen: bool = False
    replicas: str = ""
    seconds: float | None = None
    device_seconds: float | None = None
    money: float | None = None
    refused: str = ""
    error: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedOutlook:
    """The simulator's figures for one wave; sums cover the whole budget.

    Attributes:
        mean_completion: mean over its jobs of the seconds until their last step, from the start of the wave.
    """

    wave: int
    tokens_per_second: float
    mean_completion: float
    bubble: Bubble
    padding_share: float
    communication_bytes: int
    noops: int


@dataclass(frozen=True, slots=True)
class ChangeOutlook:
    """Whether a later wave, which trains other jobs, gets a new deployment.

    Attributes:
        step_seconds: expected seconds on the deployment so far; None if one of its samples fits into none
            of the replicas, so that it must change.
        replicas: replicas planned for the wave; None if not even the bound of all deployments pays off.
        new_step_seconds: expected seconds on ``replicas``, or that bound.
        saved: seconds saved over the wave's steps, minus the restart; None if it must change.
        break_even: steps after which the restart has paid for itself; None if never, or if it must change.
    """

    wave: int
    steps: int
    step_seconds: float | None
    replicas: str | None
    new_step_seconds: float
    saved: float | None
    break_even: int | None
    changed: bool


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan of a search.

    Attributes:
        profile: the profile whose coefficients were used; None if there is none.
        gap: distance of the deployment's expected step to the proved bound; None if nothing was chosen.
        step_seconds: expected seconds of the first wave's mean step; None if nothing was chosen.
        equal_replicas: the best equal replicas for it; their expected seconds are ``equal_step_seconds``.
        changes: changes of the deployment, one for each later wave; none if nothing is deployed.
        device_seconds_alone: device-seconds of the same jobs one after another on the same devices, including
            idle ones.
        device_seconds_side_by_side: device-seconds of the same jobs without Plait, each on its own replica;
            None for one device.
        trials: trials sorted by name, with the values that distinguish them.
        objective: the objective by which devices were chosen; None if they were given.
        every: the outlook for each requested number of devices.
        why: why one of these is the best.
        processes: the outlook for each of several processes on this machine.
        candidates: replicas that were weighed, if they were left open, and why one was chosen.
        measure: the command that measures the seconds, if they are unknown for want of a profile.
        money: cost of the devices; None if a price or the time is not known.
        error: mean absolute relative error of predicted seconds, as measured by the profile; None if it
            has none.
        error_source: what ``error`` was measured on, or why there is none.
    """

    cluster: str
    devices: str
    profile: str | None
    replicas: tuple[ReplicaOutlook, ...]
    groups: tuple[GroupOutlook, ...]
    microbatches: int
    microbatches_alone: int
    assumptions: tuple[str, ...]
    gap: float | None = None
    step_seconds: float | None = None
    equal_replicas: str | None = None
    equal_step_seconds: float | None = None
    changes: tuple[ChangeOutlook, ...] = ()
    simulated: tuple[SimulatedOutlook, ...] = ()
    predicted_seconds: float | None = None
    device_seconds: float | None = None
    device_seconds_alone: float | None = None
    device_seconds_side_by_side: float | None = None
    trials: tuple[TrialOutlook, ...] = ()
    objective: ObjectiveOutlook | None = None
    every: tuple[DevicesOutlook, ...] = ()
    why: str = ""
    processes: tuple[ProcessOutlook, ...] = ()
    candidates: tuple[CandidateOutlook, ...] = ()
    measure: str = ""
    money: float | None = None
    error: float | None = None
    error_source: str = ""

    def mapping(self) -> dict[str, Any]:
        """The plan as a mapping for JSON."""
        return asdict(self)

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
        wave: from 1; jobs of a later wave start when those before it are done.
        microbatches: of the whole budget, packed together, in which its jobs have samples.
        predicted_seconds: until the group's last step, from the start of its wave.
        predicted_bytes: most on one device while it trains, weights and what else is there included.
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
        predicted_bytes: largest on one device, weights included.
        bytes_source: what they are predicted from; "" if nothing is predicted.
        kind: of device, if there are several.
    """

    tp: int
    pp: int
    count: int
    capacity: int
    layer_split: tuple[int, ...] = ()
    predicted_bytes: int | None = None
    bytes_source: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TrialOutlook:
    """One trial.

    Attributes:
        values: of the config keys that differ between trials.
        replicas: share of its tokens that each kind of replica trains; empty on one device.
    """

    trial: str
    wave: int
    values: Mapping[str, Any]
    replicas: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectiveOutlook:
    """By what the devices were chosen, of those that there are.

    Attributes:
        available: devices of the cluster.
        slack: share of the objective that may be given up for the other side of it.
        value: of the first wave's mean step.
        bound: proved: no number of devices has a lower value.
        gap: distance of the value to the bound, relative; 0 if both are 0, because devices are free.
    """

    objective: str
    available: str
    slack: float
    value: float
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class DevicesOutlook:
    """The search on one number of devices.

    Attributes:
        refused: why the search cannot run on them; "" if it can.
        error: of the predicted seconds, as of :class:`Outlook`, but on these devices.
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
    """Whether a later wave, which trains other jobs, gets a deployment of its own.

    Attributes:
        step_seconds: expected on the deployment so far; None if one of its samples fits into none of its
            replicas, so that it must change.
        replicas: planned for the wave; None if already the bound of all deployments does not pay.
        new_step_seconds: expected on ``replicas``, or that bound.
        saved: seconds over the wave's steps, the restart taken off; None if it must change.
        break_even: steps after which the restart has paid for itself; None if it never does, or must be.
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
        profile: whose coefficients were used; None if there is none.
        gap: distance of the deployment's expected step to the proved bound; None if nothing was chosen.
        step_seconds: expected of the first wave's mean step; None if nothing was chosen.
        equal_replicas: the best of equal replicas for it; its expected seconds are ``equal_step_seconds``.
        changes: of the deployment, one for each later wave; if nothing is deployed, none.
        device_seconds_alone: the same jobs one after another on the same devices, idle ones counted.
        device_seconds_side_by_side: the same jobs without Plait, each alone on a replica of its own; None for
            one device.
        trials: in order of their names, with what distinguishes them.
        objective: by what the devices were chosen; None if they were given.
        every: of the numbers of devices that were asked for.
        money: that the devices cost; None if a price or the time is not known.
        error: mean absolute error of predicted seconds, relative, as measured by the profile; None if it
            has none.
        error_source: what that was measured on, or why there is none.
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
    money: float | None = None
    error: float | None = None
    error_source: str = ""

    def mapping(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return asdict(self)

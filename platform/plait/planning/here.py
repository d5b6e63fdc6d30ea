"""Plans a search on this machine: admission by memory, packing, and the share of each of its processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from plait.core.plans import Microbatch, Replica
from plait.core.settings import RunSettings
from plait.cost.clusters import HOUR
from plait.cost.profile_store import Profile
from plait.cost.replica import Configuration, ReplicaCost
from plait.cost.time import MicrobatchShape, TimeModel
from plait.engine.admission import Admission, Demand
from plait.engine.packer import Packer
from plait.planner.schedule import turns
from plait.planning.outlook import GroupOutlook, Outlook, ProcessOutlook, ReplicaOutlook, TrialOutlook
from plait.planning.workload import MOST_STEPS, Phase, Workload

PROFILED = "from the stored profile"
ESTIMATED = "estimated from the model's shape"
HELD_OUT = "probes of `plait profile` that were not used for fitting"
NO_STEPS = "Seconds cover microbatches only: optimiser steps, evaluations and startup are not included."
NO_EXCHANGE = "The exchange of gradients between processes is not included either."
SHARED = (
    "Processes on one processor share its memory bandwidth: together they are slower than the profile, "
    "which was measured with only one of them running."
)
DRAINED = "Each step fills and drains the stages of a replica; training drains a single pipeline more rarely."
NOT_REPEATED = (
    "The packing solver reached its time limit: the best packing found is used, and another run may pack "
    "differently."
)
WAVES = (
    "The plan assumes that a wave starts when the previous one has finished. Training fills a slot as soon "
    "as it is free, and the real sampler learns from results; a plan cannot."
)
TRUNCATED = f"At most {MOST_STEPS} steps of a wave's jobs are planned; later steps are assumed to be similar."


@dataclass(frozen=True, slots=True)
class Here:
    """What a run takes of this machine.

    Attributes:
        devices: in words.
        number: how many, all of which are paid for.
        measure: the command that measures the seconds of a process.
        replicas: of the processes, with their capacities and speeds.
        dispatch: seconds by which samples are dispatched to them, as in a run.
        time: seconds of their microbatches; None: unknown.
        unknown: why they are.
    """

    devices: str
    replicas: Sequence[Replica]
    number: int = 1
    measure: str = "plait profile"
    dispatch: TimeModel | None = None
    time: TimeModel | None = None
    unknown: str = ""


def plan_here(
    workload: Workload, settings: RunSettings, admission: Admission, profile: Profile | None, here: Here
) -> Outlook:
    """Plan waves of jobs that fit into memory, and their microbatches.

    Args:
        profile: stored profile of the model on this machine; without its seconds, the plan has none.

    Raises:
        CapacityError: a job does not fit even alone.
        ModelError: the model does not have a target or rank.
    """
    demands = {
        job.name: admission.demand(job.adapter, workload.longest[job.name], job.train.global_batch)
        for job in workload.jobs
    }
    waves = fill_waves(
        list(demands),
        lambda names: len(names) <= settings.most_jobs and admission.fits([demands[name] for name in names]),
    )
    capacity, time = settings.engine.capacity_or_usual, here.time
    packer = Packer(here.replicas, here.dispatch)
    parts = [
        (wave, phase, _Packed.of(phase, workload.labelled_share, packer, here))
        for wave, names in enumerate(waves, start=1)
        for phase in workload.phases(names)
    ]
    groups = _groups(parts, here.number, lambda names: admission.predicted([demands[name] for name in names]))
    alone = [
        _Packed.of(phase, workload.labelled_share, packer, here)
        for job in workload.jobs
        for phase in workload.phases([job.name])
    ]
    together = [[demands[name] for name in names] for names in waves]
    processes = _processes(here.replicas, [packed for *_, packed in parts], admission, together)
    seconds = _total(packed.seconds for *_, packed in parts)
    price, differing = settings.cluster.price_per_device_hour, workload.differing()
    return Outlook(
        cluster="local",
        devices=here.devices,
        profile=_described(profile),
        replicas=_replicas(here.replicas, capacity, groups, admission, list(demands.values()), together),
        groups=tuple(groups),
        microbatches=sum(group.microbatches for group in groups),
        microbatches_alone=sum(each.microbatches for each in alone),
        assumptions=_assumptions(parts, here, timed=time is not None, repeats=packer.repeats),
        predicted_seconds=seconds,
        device_seconds=_times(here.number, seconds),
        device_seconds_alone=_times(here.number, _total(each.seconds for each in alone)),
        trials=tuple(
            TrialOutlook(name, wave, differing[name])
            for wave, names in enumerate(waves, start=1)
            for name in names
        ),
        money=None if price is None or seconds is None else here.number * seconds / HOUR * price,
        error=None if profile is None or time is None else profile.time_error,
        error_source=_error_source(here),
        measure=here.measure if profile is None or profile.time is None else "",
        processes=processes,
    )


@dataclass(frozen=True, slots=True)
class _Packed:
    """Microbatches of jobs that train together in a phase.

    Attributes:
        seconds: of each step those of its slowest replica, summed; None if nothing is known.
        busy, tokens: by replica.
    """

    microbatches: int
    seconds: float | None
    busy: tuple[float, ...] | None
    tokens: tuple[float, ...]

    @classmethod
    def of(cls, phase: Phase, labelled_share: float, packer: Packer, here: Here) -> _Packed:
        """The microbatches as the engine packs them."""
        batches, scale, time, replicas = phase.batches, phase.scale, here.time, here.replicas
        packed = [packer.pack(turn) for turn in turns(batches, [tuple(batches)])]
        tokens, busy = np.zeros((2, len(packed), len(replicas)))
        for step, microbatches in enumerate(packed):
            for at, replica in enumerate(replicas):
                own = [each for each in microbatches if each.replica == replica.id]
                tokens[step, at] = sum(each.tokens for each in own)
                if time is not None and own:
                    busy[step, at] = _seconds(replica, own, time, labelled_share)
        return cls(
            round(scale * sum(map(len, packed))),
            None if time is None else scale * float(busy.max(axis=1).sum()),
            None if time is None else tuple(map(float, scale * busy.sum(axis=0))),
            tuple(map(float, scale * tokens.sum(axis=0))),
        )


def _seconds(
    replica: Replica, microbatches: Sequence[Microbatch], time: TimeModel, labelled_share: float
) -> float:
    """Seconds of a replica's microbatches: those of its slowest stage and, while it fills and drains, of the
    longest microbatch."""
    lengths = [[n for segment in each.segments for n in segment.lengths] for each in microbatches]
    shapes = [MicrobatchShape.of(own, labelled=round(labelled_share * sum(own))) for own in lengths]
    split = replica.layer_split or (time.layers,)
    stages = np.array(
        [
            [
                time.stage(shape, tp=replica.tp, layers=layers, last=stage == len(split) - 1).total
                for stage, layers in enumerate(split)
            ]
            for shape in shapes
        ]
    )
    ramp = 0.0
    if len(split) > 1:
        most = max(max(own) for own in lengths)
        configuration = Configuration(
            replica.tp, len(split), max(most, replica.capacity or 0), layer_split=split
        )
        ramp = ReplicaCost.of(configuration, [most], time, labelled_share=labelled_share).ramp
    return float(stages.sum(axis=0).max() + ramp * stages.max()) / replica.speed


def _processes(
    replicas: Sequence[Replica],
    parts: Sequence[_Packed],
    admission: Admission,
    waves: Sequence[Sequence[Demand]],
) -> tuple[ProcessOutlook, ...]:
    """What each of several whole replicas, a process each, holds and does; nothing for a single one."""
    if len(replicas) == 1 or any(each.tp * each.pp > 1 for each in replicas):
        return ()
    seconds = _total(part.seconds for part in parts)
    found = []
    for at, each in enumerate(replicas):
        busy = _total(None if part.busy is None else part.busy[at] for part in parts)
        found.append(
            ProcessOutlook(
                process=each.id,
                device=", ".join(each.devices),
                capacity=each.capacity or 0,
                predicted_bytes=max(admission.predicted_on(each, demands) for demands in waves),
                tokens=round(sum(part.tokens[at] for part in parts)),
                busy_seconds=busy,
                waiting_share=1 - busy / seconds if busy is not None and seconds else None,
            )
        )
    return tuple(found)


def _assumptions(
    parts: Sequence[tuple[int, Phase, _Packed]], here: Here, *, timed: bool, repeats: bool
) -> tuple[str, ...]:
    processes = len(here.replicas)
    said = {
        WAVES: True,
        TRUNCATED: any(phase.scale > 1 for _, phase, _ in parts),
        NO_STEPS: timed,
        NO_EXCHANGE: timed and processes > 1,
        SHARED: timed and here.number < processes,
        DRAINED: timed and any(each.pp > 1 for each in here.replicas),
        NOT_REPEATED: not repeats,
    }
    return tuple(line for line, holds in said.items() if holds)


def _groups(
    parts: Iterable[tuple[int, Phase, _Packed]], number: int, predict: Callable[[Sequence[str]], int]
) -> list[GroupOutlook]:
    """One group for each phase of a wave: on one device, all jobs that train at once form a group."""
    groups = list[GroupOutlook]()
    for wave, phase, packed in parts:
        begun = groups[-1].predicted_seconds if groups and groups[-1].wave == wave else 0.0
        groups.append(
            GroupOutlook(
                wave=wave,
                jobs=tuple(phase.batches),
                steps=phase.steps * len(phase.batches),
                microbatches=packed.microbatches,
                predicted_seconds=_total((begun, packed.seconds)),
                device_seconds=_times(number, packed.seconds),
                predicted_bytes=predict(tuple(phase.batches)),
            )
        )
    return groups


def _error_source(here: Here) -> str:
    """What the error of the seconds was measured on, or why they are unknown."""
    if here.time is not None:
        return HELD_OUT
    return here.unknown or f"seconds need a profile, from `{here.measure}`"


def _total(seconds: Iterable[float | None]) -> float | None:
    """The sum; None if one of them is not known."""
    known = list(seconds)
    return None if None in known else math.fsum(each for each in known if each is not None)


def _times(number: int, seconds: float | None) -> float | None:
    return None if seconds is None else number * seconds


def _described(profile: Profile | None) -> str | None:
    if profile is None:
        return None
    said = f"{profile.model}, {profile.key.dtype}, on {profile.key.device}: {profile.how} by `plait profile`"
    return said if profile.time is not None else f"{said}; of its memory alone"


def _replicas(
    replicas: Sequence[Replica],
    capacity: int,
    groups: Sequence[GroupOutlook],
    admission: Admission,
    demands: Sequence[Demand],
    waves: Sequence[Sequence[Demand]],
) -> tuple[ReplicaOutlook, ...]:
    """The replicas, those that are alike together, with the peak of the fullest process."""
    source = PROFILED if admission.model_for(demands) is not None else ESTIMATED
    if len(replicas) == 1 and replicas[0].tp * replicas[0].pp == 1:
        most = max(group.predicted_bytes or 0 for group in groups)
        return (ReplicaOutlook(1, 1, 1, capacity, (), most, source),)
    held = Counter(
        (
            each.tp,
            each.pp,
            each.capacity or 0,
            each.layer_split if each.pp > 1 else (),
            max(admission.predicted_on(each, own) for own in waves),
        )
        for each in replicas
    )
    return tuple(
        ReplicaOutlook(tp, pp, count, own, split, most, source)
        for (tp, pp, own, split, most), count in held.items()
    )


def fill_waves(names: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[tuple[str, ...]]:
    """Divide names into waves, in order: a new wave begins when the next name does not fit into the current
    one."""
    waves: list[tuple[str, ...]] = []
    for name in names:
        if waves and fits([*waves[-1], name]):
            waves[-1] = (*waves[-1], name)
        else:
            waves.append((name,))
    return waves

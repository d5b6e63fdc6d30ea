"""Plans a search on this machine: one replica, admission by memory, exact packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plait.core.settings import RunSettings
from plait.cost.clusters import HOUR
from plait.cost.profile_store import Profile
from plait.cost.time import MicrobatchShape, TimeModel
from plait.engine.admission import Admission, Demand
from plait.planner.packing_exact import pack_all
from plait.planner.schedule import turns
from plait.planning.outlook import GroupOutlook, Outlook, ReplicaOutlook, TrialOutlook
from plait.planning.workload import MOST_STEPS, Phase, Workload

PROFILED = "from the stored profile"
ESTIMATED = "estimated from the model's shape"
HELD_OUT = "probes of `plait profile` that the profile was not fitted to"
NO_STEPS = "Seconds cover microbatches only: optimiser steps, evaluations and startup are not included."
ONE_PROCESS = (
    "Microbatches and seconds are those of one process: how much faster cluster.processes={processes} is, is "
    "not predicted. Device-seconds and money count every device for all of these seconds."
)
NOT_REPEATED = (
    "The packing solver reached its time limit: the best packing found is used, and another run may pack "
    "differently."
)
WAVES = (
    "The plan assumes that a wave starts when the previous one is done. Training fills a slot as soon as "
    "it is free, and the real sampler learns from results; a plan cannot."
)
TRUNCATED = f"At most {MOST_STEPS} steps of a wave's jobs are planned; later steps are assumed to be similar."


def plan_here(
    workload: Workload,
    settings: RunSettings,
    admission: Admission,
    profile: Profile | None,
    *,
    devices: str,
    number: int = 1,
) -> Outlook:
    """Plan waves of jobs that fit into memory, and their microbatches.

    Args:
        profile: stored profile of the model on this machine; without its seconds, the plan has none.
        number: number of devices, all of which are paid for.

    Raises:
        CapacityError: a job does not fit even alone.
        ModelError: the model does not have a target or rank.
    """
    most = min(settings.search.parallel, settings.planner.max_jobs or settings.search.parallel)
    demands = {job.name: admission.demand(job.adapter, workload.longest[job.name]) for job in workload.jobs}
    waves = fill_waves(
        [job.name for job in workload.jobs],
        lambda names: len(names) <= most and admission.fits([demands[name] for name in names]),
    )
    capacity, time = settings.engine.capacity_or_usual, None if profile is None else profile.time
    parts = [
        (wave, phase, _Packed.of(phase, workload.labelled_share, capacity, time))
        for wave, names in enumerate(waves, start=1)
        for phase in workload.phases(names)
    ]
    groups = _groups(parts, number, lambda names: admission.predicted([demands[name] for name in names]))
    alone = [
        _Packed.of(phase, workload.labelled_share, capacity, time)
        for job in workload.jobs
        for phase in workload.phases([job.name])
    ]
    seconds = _total(packed.seconds for *_, packed in parts)
    price, differing = settings.cluster.price_per_device_hour, workload.differing()
    return Outlook(
        cluster="local",
        devices=devices,
        profile=_described(profile),
        replicas=(_replica(capacity, groups, admission, list(demands.values())),),
        groups=tuple(groups),
        microbatches=sum(group.microbatches for group in groups),
        microbatches_alone=sum(each.microbatches for each in alone),
        assumptions=_assumptions(parts, settings.cluster.processes, timed=time is not None),
        predicted_seconds=seconds,
        device_seconds=_times(number, seconds),
        device_seconds_alone=_times(number, _total(each.seconds for each in alone)),
        trials=tuple(
            TrialOutlook(name, wave, differing[name])
            for wave, names in enumerate(waves, start=1)
            for name in names
        ),
        money=None if price is None or seconds is None else number * seconds / HOUR * price,
        error=None if profile is None or time is None else profile.time_error,
        error_source=HELD_OUT if time is not None else "none: seconds need a profile, from `plait profile`",
    )


@dataclass(frozen=True, slots=True)
class _Packed:
    """Microbatches of jobs that train together in a phase, and their seconds if known.

    ``repeats``: whether packing again gives the same result, because no time limit ended it.
    """

    microbatches: int
    seconds: float | None
    repeats: bool

    @classmethod
    def of(cls, phase: Phase, labelled_share: float, capacity: int, time: TimeModel | None) -> _Packed:
        batches, scale = phase.batches, phase.scale
        packed = pack_all(list(turns(batches, [tuple(batches)])), capacity=capacity)
        bins = [
            [each.batches[batch].lengths[place] for batch, place in items]
            for each in packed
            for items in each.bins
        ]
        seconds = None
        if time is not None:
            shapes = (
                MicrobatchShape.of(lengths, labelled=round(labelled_share * sum(lengths))) for lengths in bins
            )
            seconds = scale * sum(time.microbatch(shape) for shape in shapes)
        repeats = all(each.limit_hit != "time" for each in packed)
        return cls(round(scale * len(bins)), seconds, repeats)


def _assumptions(
    parts: Sequence[tuple[int, Phase, _Packed]], processes: int, *, timed: bool
) -> tuple[str, ...]:
    said = {
        WAVES: True,
        TRUNCATED: any(phase.scale > 1 for _, phase, _ in parts),
        NO_STEPS: timed,
        ONE_PROCESS.format(processes=processes): processes > 1,
        NOT_REPEATED: not all(packed.repeats for *_, packed in parts),
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


def _total(seconds: Iterable[float | None]) -> float | None:
    """The sum; None if one of them is not known."""
    known = list(seconds)
    return None if None in known else math.fsum(each for each in known if each is not None)


def _times(number: int, seconds: float | None) -> float | None:
    return None if seconds is None else number * seconds


def _described(profile: Profile | None) -> str | None:
    if profile is None:
        return None
    return f"{profile.model}, {profile.key.dtype}, on {profile.key.device}: {profile.how} by `plait profile`"


def _replica(
    capacity: int, groups: Sequence[GroupOutlook], admission: Admission, demands: Sequence[Demand]
) -> ReplicaOutlook:
    known = admission.model_for(demands) is not None
    most = max(group.predicted_bytes or 0 for group in groups)
    return ReplicaOutlook(1, 1, 1, capacity, (), most, PROFILED if known else ESTIMATED)


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

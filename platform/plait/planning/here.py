"""The plan of a search on this machine: one replica, admission by memory, exact packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.engine.admission import Admission
from plait.planner.packing_exact import pack_all
from plait.planner.schedule import turns
from plait.planning.outlook import GroupOutlook, Outlook, ReplicaOutlook
from plait.planning.workload import Workload
from plait.settings import RunSettings

ESTIMATED = "estimated from the model's shape"
WAVES = (
    "A wave starts when the one before it is done. Training fills places as they come free, and goes where "
    "the sampler leads: trials here are drawn without results."
)
TRUNCATED = "Of each job the first 64 steps are planned; those after them are taken to be like them."


def plan_here(workload: Workload, settings: RunSettings, admission: Admission, *, devices: str) -> Outlook:
    """Waves of jobs that fit into memory, and their microbatches.

    Args:
        workload: of the search.
        settings: capacity and limits on jobs.
        admission: the coordinator's own.
        devices: in words.

    Raises:
        CapacityError: a job does not fit even alone.
        ModelError: a target or rank that the model does not have.
    """
    demands = {job.name: admission.demand(job.adapter, workload.longest[job.name]) for job in workload.jobs}
    waves = fill_waves(
        [job.name for job in workload.jobs],
        lambda names: (
            len(names) <= settings.search.parallel and admission.fits([demands[name] for name in names])
        ),
    )
    most_bytes = max(admission.predicted([demands[name] for name in names]) for names in waves)
    capacity = settings.engine.capacity_or_usual
    return Outlook(
        cluster="local",
        devices=devices,
        profile="unknown: no time has been measured here",
        replicas=(ReplicaOutlook(1, 1, 1, capacity, (), most_bytes, ESTIMATED),),
        groups=tuple(_group(workload, names, wave, capacity) for wave, names in enumerate(waves, start=1)),
        microbatches_alone=sum(_alone(workload, job.name, capacity) for job in workload.jobs),
        assumptions=(WAVES, *((TRUNCATED,) if workload.truncated else ())),
    )


def fill_waves(names: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[tuple[str, ...]]:
    """Names in their order, cut whenever the next one does not fit beside those before it."""
    waves: list[tuple[str, ...]] = []
    for name in names:
        if waves and fits([*waves[-1], name]):
            waves[-1] = (*waves[-1], name)
        else:
            waves.append((name,))
    return waves


def _group(workload: Workload, names: tuple[str, ...], wave: int, capacity: int) -> GroupOutlook:
    batches = {name: workload.batches[name] for name in names}
    packed = pack_all(list(turns(batches, [names])), capacity=capacity)
    return GroupOutlook(
        wave=wave,
        jobs=names,
        steps=sum(workload.steps[name] for name in names),
        microbatches=round(workload.scale(names) * sum(len(each.bins) for each in packed)),
    )


def _alone(workload: Workload, name: str, capacity: int) -> int:
    packed = pack_all([(batch,) for batch in workload.batches[name]], capacity=capacity)
    return round(workload.scale([name]) * sum(len(each.bins) for each in packed))

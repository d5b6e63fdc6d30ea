"""The replicas of a run: how many tokens each takes at once, and how fast it is.

A seam: capacities and speeds are given, or follow from what the devices say; everything after this reads one
list.
"""

from __future__ import annotations

from dataclasses import replace

from plait.core.plans import Replica
from plait.core.settings import RunSettings
from plait.cost.profile_store import Profile
from plait.cost.time import TimeModel, arithmetic_time
from plait.engine.admission import LEAST_CAPACITY, Admission
from plait.engine.worker import WorkerFacts


def replicas_of(facts: WorkerFacts, settings: RunSettings, profile: Profile | None) -> tuple[Replica, ...]:
    """Every replica with its capacity and speed.

    If no capacities are given, all have ``engine.capacity``; for a device with less memory than others it is
    halved until a usual job fits.
    """
    whole, given = settings.engine.capacity_or_usual, facts.capacities or settings.cluster.replica_capacities
    most = max(facts.replica_bytes, default=0)
    found = []
    for number, device in enumerate(facts.devices):
        own = facts.replica_bytes[number] if facts.replica_bytes else most
        capacity = given[number] if given else whole
        if not given and own < most:
            own_facts = replace(facts, memory_bytes=own, replica_bytes=())
            capacity, _ = fitting_capacity(own_facts, settings, profile)
        speed = facts.speeds[number] if facts.speeds else 1.0
        pp = (facts.stages[number] if facts.stages else 1) // facts.tensor
        split = facts.splits[number] if facts.splits else ()
        found.append(Replica(number, facts.tensor, pp, split, (device,), capacity, speed))
    return tuple(found)


def fitting_capacity(facts: WorkerFacts, settings: RunSettings, profile: Profile | None) -> tuple[int, bool]:
    """The run's capacity, halved until a usual job fits into the memory of one replica; whether it fits."""
    capacity = settings.engine.capacity_or_usual
    while True:
        engine = replace(settings.engine, capacity=capacity)
        own = replace(settings, engine=engine, cluster=replace(settings.cluster, capacities=()))
        admission = Admission(facts, own, profile)
        fits = admission.fits([admission.usual])
        if fits or capacity // 2 < LEAST_CAPACITY:
            return capacity, fits
        capacity //= 2


def dispatch_time(facts: WorkerFacts, profile: Profile | None) -> TimeModel:
    """By what samples are dispatched: the stored profile's seconds, else the arithmetic of the model."""
    if profile is not None and profile.time is not None:
        return profile.time
    weights = sum(each.in_features * each.out_features for each in facts.linears)
    shape = facts.shape
    return arithmetic_time(shape.layers, weights=weights, hidden=shape.hidden, vocabulary=shape.vocabulary)

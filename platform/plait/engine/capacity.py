"""How many tokens a microbatch may have, where the settings leave it open."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from plait.core.errors import CapacityError
from plait.core.jobs import AdapterSpec
from plait.core.settings import USUAL_CAPACITY, RunSettings
from plait.cost.profile_store import Profile
from plait.engine.admission import Admission, WorkerFacts

LEAST_CAPACITY = 128  # smaller microbatches are not tried, however little memory there is


def choose_capacity(
    settings: RunSettings,
    facts: WorkerFacts,
    profile: Profile | None,
    jobs: Collection[tuple[AdapterSpec, int]],
    recorded: int | None = None,
) -> int:
    """The capacity of a run: the one given, else the one recorded, else the profile's, else the usual one.

    One that is not given is at least the longest sample, and is halved while a job does not fit into memory.

    Args:
        settings: of the run; ``engine.capacity`` is None where it is left open.
        facts: of the worker.
        profile: stored, of this model on this device, or None.
        jobs: each adapter with the tokens of the longest sample that it is trained on.
        recorded: what a search was begun with.
    """
    if settings.engine.capacity is not None:
        return settings.engine.capacity
    longest = max((length for _, length in jobs), default=0)
    if recorded is not None:
        return max(recorded, longest)
    most = max(profile.capacity if profile is not None else USUAL_CAPACITY, longest)
    least = max(longest, LEAST_CAPACITY)
    tried = most
    while tried > least and not _fits(tried, settings, facts, profile, jobs):
        tried = max(tried // 2, least)
    return tried


def _fits(
    capacity: int,
    settings: RunSettings,
    facts: WorkerFacts,
    profile: Profile | None,
    jobs: Collection[tuple[AdapterSpec, int]],
) -> bool:
    """Whether each job fits into memory by itself."""
    engine = replace(settings.engine, capacity=capacity)
    admission = Admission(facts, replace(settings, engine=engine), profile)
    try:
        for adapter, longest in jobs:
            admission.demand(adapter, longest)
    except CapacityError:
        return False
    return True

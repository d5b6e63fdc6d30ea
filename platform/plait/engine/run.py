"""Train jobs together from a program: what the command line does, without a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from plait.core.jobs import JobSpec
from plait.core.lifecycle import JobResult
from plait.core.messages import Event
from plait.core.settings import RunSettings
from plait.data import generation_limit, load_data, score
from plait.engine.capacity import choose_capacity
from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.evaluation import check_keep


def train_jobs(
    jobs: Sequence[JobSpec],
    settings: RunSettings,
    *,
    folder: Path,
    cache: Path,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[JobResult]:
    """Load data and model and train jobs jointly, as many at once as memory and ``planner.max_jobs`` allow.

    Args:
        jobs: with names of their own.
        settings: of the run.
        folder: finished adapters go to ``adapters/`` in it.
        cache: for converted models and tokenised data.
        on_event: called with each event, at the end of the iteration that it belongs to.

    Returns:
        How each job ended, in the order of ``jobs``.

    Raises:
        InputError: model or data cannot be loaded; a job's targets or rank cannot be used; a job does not
            fit into memory.
    """
    from plait.engine.worker import local_worker
    from plait.models import inspect_model, load_tokeniser

    load = partial(
        load_data,
        tokeniser=load_tokeniser(settings.model, cache=cache),
        max_length=inspect_model(settings.model, cache=cache).max_length,
        capacity=settings.engine.capacity,
        cache=cache,
    )
    data = DataCatalogue(load, generation_limit=generation_limit, judge=score)
    asked = {(job.adapter, data.longest(job.data)) for job in jobs}  # what is wrong shows before the model
    for job in jobs:
        check_keep(job, validation=len(data.of(job.data).validation) > 0)
    worker = local_worker(settings, data, cache=cache)
    capacity = choose_capacity(settings, worker.facts, None, asked)
    settings = replace(settings, engine=replace(settings.engine, capacity=capacity))
    return drive(Coordinator(worker, data, settings, folder=folder), jobs, on_event=on_event)


def drive(
    coordinator: Coordinator, jobs: Sequence[JobSpec], *, on_event: Callable[[Event], None] = lambda _: None
) -> list[JobResult]:
    """Submit jobs to a coordinator and advance it until they have all ended; as :func:`train_jobs`."""
    for job in jobs:
        coordinator.submit(job)
    ended: dict[str, JobResult] = {}
    while not coordinator.idle:
        for event in coordinator.advance():
            if isinstance(event, JobResult):
                ended[event.job] = event
            on_event(event)
    return [ended[job.name] for job in jobs]

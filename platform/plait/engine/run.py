"""Train jobs together from a program: what the command line does, without a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from plait.engine.catalogue import DataCatalogue
from plait.engine.coordinator import Coordinator
from plait.engine.ledger import Worker
from plait.engine.messages import Event, JobEnded
from plait.jobs import JobSpec
from plait.settings import RunSettings


def train_jobs(
    jobs: Sequence[JobSpec],
    settings: RunSettings,
    *,
    worker: Worker,
    data: DataCatalogue,
    folder: Path,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[JobEnded]:
    """Train jobs jointly to their ends, as many at once as memory and ``planner.max_jobs`` allow.

    Args:
        jobs: with names of their own.
        settings: of the run.
        worker: owns the model: ``plait.engine.worker.local_worker(settings, data, cache=...)``.
        data: the jobs' data sets, shared with an in-process worker.
        folder: finished adapters go to ``adapters/`` in it.
        on_event: called with each event, at the end of the iteration that it belongs to.

    Returns:
        How each job ended, in the order of ``jobs``.

    Raises:
        InputError: a job's data, targets or rank cannot be used, or it does not fit into memory alone.
    """
    coordinator = Coordinator(worker, data, settings, folder=folder)
    for job in jobs:
        coordinator.submit(job)
    ended: dict[str, JobEnded] = {}
    while not coordinator.idle:
        for event in coordinator.advance():
            if isinstance(event, JobEnded):
                ended[event.job] = event
            on_event(event)
    return [ended[job.name] for job in jobs]

"""A search's trials all at once, for those who only want the jobs: benchmarks and simulations."""

from __future__ import annotations

from dataclasses import replace

import optuna

from plait.core.jobs import JobSpec
from plait.search.command import SearchCommand
from plait.search.identity import identify
from plait.search.storage import quiet
from plait.search.study import StudyTrials


def draw_jobs(command: SearchCommand) -> list[JobSpec]:
    """The jobs that the search would train if nothing were known of any result; nothing is kept.

    Raises:
        InputError: the sampler cannot do the space, or a value is wrong.
    """
    quiet()
    settings = command.settings
    search = replace(settings.search, fresh=False)
    identity = identify(command.space, command.base, settings)
    source = StudyTrials(search, command.space, identity, optuna.storages.InMemoryStorage())
    jobs = []
    while (trial := source.ask()) is not None:
        jobs.append(command.make_job(trial))
    return jobs

"""A search as the command line asked for it, before anything is checked or loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.core.space import Space
from plait.search.trials import Trial


@dataclass(frozen=True, slots=True)
class SearchCommand:
    """What to search, and how to make jobs of it.

    Attributes:
        settings: of the run.
        space: what is searched; empty for a single job.
        base: the job with nothing searched.
        make_job: the job of a trial, leaving its configuration on disk.
        probes: jobs that together have every choice and both ends of every range.
        config: resolved configuration as YAML.
        command: the command line, program first.
        overrides: as given.
        directory: Hydra's folder of this run.
        verb: of Plait's command: "sweep" or "train".
    """

    settings: RunSettings
    space: Space
    base: JobSpec
    make_job: Callable[[Trial], JobSpec]
    probes: tuple[JobSpec, ...]
    config: str
    command: tuple[str, ...]
    overrides: tuple[str, ...]
    directory: Path
    verb: str = "sweep"

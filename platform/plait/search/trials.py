"""A trial, and the command of a search, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.jobs import JobSpec
from plait.core.settings import RunSettings
from plait.core.space import Space, Value
from plait.distributed.places import Place


@dataclass(frozen=True, slots=True)
class Trial:
    """One point to try.

    Attributes:
        overrides: the overrides that set these keys, in Hydra's syntax.
        resume_from: checkpoint that an interrupted run saved.
        warm_from: folder with the weights that it starts with; None for fresh ones.
        outside: its settings outside the search space, as overrides; "" if there are none.
    """

    number: int
    values: Mapping[str, Value] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    resume_from: Path | None = None
    warm_from: Path | None = None
    outside: str = ""

    @property
    def name(self) -> str:
        """The job's name."""
        return f"trial-{self.number:04d}"


@dataclass(frozen=True, slots=True)
class SearchCommand:
    """A search as requested on the command line, before anything is checked or loaded.

    Attributes:
        space: the search space; empty for a single job.
        base: the job without any searched values.
        make_job: makes the job of a trial, and writes its configuration to disk.
        probes: jobs that together have every choice and both ends of every range.
        config: resolved configuration as YAML.
        command: the command line, program first.
        directory: Hydra's folder of this run.
        place: of this process among those that a launcher started; None if it started none.
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
    place: Place | None = None

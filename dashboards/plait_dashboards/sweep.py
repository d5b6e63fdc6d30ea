"""A search as its figures need it: plain data, no store behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.lifecycle import JobState
from plait.search.stored import Importance, StudyObjective
from plait.tracking import JobRecord
from plait.tracking.leaderboard import varying
from plait.tracking.tables import GroupStepRow

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

# How a job came out. "useful" is what the search was for; the others are what it cost besides.
USEFUL, PRUNED, STOPPED, FAILED = "useful", JobState.PRUNED, JobState.STOPPED, JobState.FAILED
INFEASIBLE, OPEN = JobState.INFEASIBLE, "not ended"
OUTCOMES = (USEFUL, PRUNED, STOPPED, INFEASIBLE, FAILED, OPEN)


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one job: values by optimiser step, steps rising."""

    steps: Integers
    values: Floats


@dataclass(frozen=True, slots=True)
class Sweep:
    """A search with all that its figures show.

    Attributes:
        records: its jobs, best objective first.
        curves: by metric name and trial.
        steps: iterations of the groups, in the order in which they ran; of a long search perhaps every k-th.
        importance: of the hyperparameters, from the study.
        objectives: those of the search, the first being the one by which the records are ordered.
        about: what was searched, by whom and when, as the search's run says; the command last.
    """

    name: str
    state: JobState
    direction: str
    metric: str
    records: tuple[JobRecord, ...]
    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    steps: tuple[GroupStepRow, ...] = ()
    importance: Importance = field(default_factory=Importance)
    objectives: tuple[StudyObjective, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def searched(self) -> list[str]:
        """Config keys that are not the same in all jobs."""
        return varying(self.records)


def outcome(record: JobRecord) -> str:
    """How a job came out: one of ``OUTCOMES``."""
    if record.state == JobState.FINISHED:
        return USEFUL
    return record.state if record.ended else OPEN


def short_names(keys: list[str]) -> dict[str, str]:
    """Config keys by their last word; whole if two would be the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)}

"""A search in the form that figures need: plain data, without a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.lifecycle import JobState
from plait.core.messages import GroupStep
from plait.tracking.leaderboard import JobRecord, varying
from plait_dashboards.importance import Importance

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

# Outcomes of jobs. "useful" is what the search was for; the others are its additional cost.
USEFUL, PRUNED, STOPPED, FAILED = "useful", JobState.PRUNED, JobState.STOPPED, JobState.FAILED
INFEASIBLE, OPEN = JobState.INFEASIBLE, "not ended"
OUTCOMES = (USEFUL, PRUNED, STOPPED, INFEASIBLE, FAILED, OPEN)


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one job: values by optimiser step, ascending."""

    steps: Integers
    values: Floats


@dataclass(frozen=True, slots=True)
class SweepObjective:
    """One objective of a search: its value by trial number, of finished trials."""

    name: str
    direction: str
    values: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A search with everything that its figures show.

    Attributes:
        records: its jobs, best objective first.
        curves: curves by metric name and trial.
        steps: iterations of the groups, in the order in which they ran; for a long search perhaps every k-th.
        importance: importance of the hyperparameters, from the study.
        objectives: objectives of the search; the records are ordered by the first one.
        about: what was searched, by whom and when, from the search's run; the command last.
    """

    name: str
    state: JobState
    direction: str
    metric: str
    records: tuple[JobRecord, ...]
    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    steps: tuple[GroupStep, ...] = ()
    importance: Importance = field(default_factory=Importance)
    objectives: tuple[SweepObjective, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def searched(self) -> list[str]:
        """Config keys that differ between jobs."""
        return varying(self.records)


def outcome(record: JobRecord) -> str:
    """The outcome of a job: one of ``OUTCOMES``."""
    if record.state == JobState.FINISHED:
        return USEFUL
    return record.state if record.ended else OPEN


def short_names(keys: list[str]) -> dict[str, str]:
    """Config keys by their last word; in full if two would be the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)}

"""Trials as the search loop sees them, whoever draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from plait.core.lifecycle import JobResult
from plait.core.space import Value


@dataclass(frozen=True, slots=True)
class Trial:
    """One point to try.

    Attributes:
        number: in its study.
        values: of the searched keys.
        overrides: that set these keys, in Hydra's syntax.
        resume_from: state that an interrupted run saved of it.
        warm_from: folder with the weights that it begins with; None for fresh ones.
    """

    number: int
    values: Mapping[str, Value] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    resume_from: Path | None = None
    warm_from: Path | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return f"trial-{self.number:04d}"


class TrialSource(Protocol):
    """Who draws the trials and is told how they went."""

    @property
    def revision(self) -> int:
        """Rises when this process draws, enqueues or ends a trial."""

    @property
    def total(self) -> int:
        """How many trials there are to be."""

    @property
    def over(self) -> int:
        """How many of them are over."""

    @property
    def failed(self) -> int:
        """How many failed, those that are dropped among them."""

    def ask(self, *, new: bool = True, above: int | None = None) -> Trial | None:
        """The next trial, or None when all have been drawn: by priority, then those that were cut short.

        Args:
            new: whether any but those that were cut short are asked for.
            above: only trials of a higher priority than this, as far as it is known before they are drawn.
        """

    def report(self, trial: Trial, step: int, value: float) -> None:
        """Keep the objective as it stands after ``step`` optimiser steps."""

    def tell(self, trial: Trial, result: JobResult) -> None:
        """The trial has ended."""

    def put_back(self, trial: Trial, checkpoint: Path | None) -> None:
        """The trial was cut short; it goes on later, from the checkpoint if there is one."""

    def lost(self) -> set[int]:
        """Numbers of the trials that other processes have taken over from this one, told once."""

    def wait(self) -> bool:
        """Wait a moment for trials that other processes train, or leave; False where there are none."""

    def finished(self) -> list[JobResult]:
        """Results of all trials that have ended, in this run and in earlier ones."""

"""Every error that Plait raises on purpose: the value, the rule it breaks and the remedy.

All are picklable, since workers can run in other processes, and each also inherits from the standard error
that a caller would expect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

FULL_ERROR = "HYDRA_FULL_ERROR"  # if this variable is 1, errors show their tracebacks
EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_FAILED_JOBS = 3
EXIT_INTERRUPTED = 130


class PlaitError(Exception):
    """Base class of Plait's errors.

    Args:
        value: what was found, with the value itself.
        rule: what must hold.
        remedy: what to do about it.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, value: str, rule: str = "", remedy: str = "") -> None:
        super().__init__(value, rule, remedy)
        self.value = value
        self.rule = rule
        self.remedy = remedy

    def __str__(self) -> str:
        return "\n".join(part for part in (self.value, self.rule, self.remedy) if part)

    @property
    def in_line(self) -> str:
        """The same in one line."""
        return "; ".join(part for part in (self.value, f"{self.rule} {self.remedy}".strip()) if part)


class InputError(PlaitError, ValueError):
    """The user's request cannot be carried out as given; exit status 2."""

    exit_status = EXIT_BAD_INPUT


class ConfigError(InputError):
    """A configuration key or value is wrong."""


class DataError(InputError):
    """A data set cannot be read, or a row of it cannot be used."""


class ModelError(InputError):
    """A base model cannot be loaded or used, or a target module matches nothing."""


class SearchError(InputError):
    """A search space, sampler or study does not fit."""


class StorageError(InputError):
    """A database, tracking server, disk or folder cannot be used."""


class CapacityError(InputError):
    """A sample, a job or a group does not fit into memory or into a microbatch."""


class ProcessError(InputError):
    """A process of the run died, was silent for too long, or did not start."""


class LostProcessError(ProcessError):
    """A process of the run is lost; started again, the processes can resume from the last checkpoints.

    Attributes:
        seconds: device time, of all processes, of the command that came to nothing.
    """

    seconds = 0.0


class ShortStageError(LostProcessError):
    """A process ran out of memory without which the others cannot continue, as a stage: so all restart."""


class GatheringInterruptedError(LostProcessError):
    """The user interrupts a run whose processes are coming together again: there is nothing to save."""


class CheckpointError(PlaitError, RuntimeError):
    """A checkpoint is missing, truncated or altered."""


def choices(names: Iterable[object]) -> str:
    """The allowed names, sorted, for the remedy of a wrong choice."""
    return ", ".join(sorted(str(name) for name in names))

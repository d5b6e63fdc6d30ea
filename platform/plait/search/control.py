"""Controls a search through its study, from any process that reaches the study's storage.

Orders are an attribute of the study, which workers read every few seconds and obey at their next iteration.
Added trials are enqueued in the study. So it does not matter which process runs on which host: orders for a
search that is not running are carried out when it resumes, and they survive a crash of either side.

The seam to `plait control`, which turns its arguments into these orders. It is imported only when an order is
given, because Optuna is slow to import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from optuna.study import Study
from optuna.trial import FrozenTrial

from plait.config.build import key_of
from plait.core.errors import SearchError, StorageError
from plait.core.lifecycle import JobState
from plait.core.space import Space
from plait.search.attributes import PRIORITY_KEY, TOKEN, enqueue, keep_weights, state_of
from plait.search.locks import WORKERS, living, trains_here
from plait.search.orders import Mode, StudyOrders
from plait.search.ownership import process_id
from plait.search.points import AddedPoint, outside_of, overrides_of, read_added
from plait.search.recorded import RecordedCommand
from plait.search.storage import Patience, SharedStudy, passes, quiet
from plait.search.stored import Standing, read_standing, stored_study
from plait.search.suggest import read_space
from plait.tracking.processes import ProcessRow, read_processes
from plait.utils.counts import counted
from plait.utils.paths import command_on, search_folder

Check = Callable[[Sequence[str]], None]  # of the overrides of a trial that is added
SHAPE = ("adapter.rank", "adapter.target_modules", "adapter.variant")

_MODES: Mapping[str, tuple[Mode, str]] = {
    "pause": (
        "paused",
        "All trials are paused after the current step; {} resumes them.",
    ),
    "resume": ("running", "The search resumes."),
    "stop": ("stopping", "No further trials start; running trials continue to the end."),
    "cancel": ("cancelling", "All trials end after the current step, and so does the search."),
}


class SearchControl:
    """Controls one search.

    Args:
        wait: seconds to wait for a storage that is unavailable.

    Raises:
        StorageError: the study is missing, or its storage does not answer.
    """

    def __init__(self, recorded: RecordedCommand, root: Path, wait: float = 0.0) -> None:
        quiet()
        until = time.monotonic() + wait
        self._name = recorded.name
        self._root = root
        self._recorded = recorded
        self._folder = search_folder(root, recorded.name)
        self._patience = Patience(stop=lambda: time.monotonic() >= until)
        self._study = self._patience(lambda: _opened(recorded, root, wait=time.monotonic() < until))
        self._shared = SharedStudy(self._study, self._patience)
        self._orders = StudyOrders(self._shared)

    def _command_on(self, verb: str, *words: str) -> str:
        return f"`{command_on(self._root, verb, self._name, *words)}`"

    @property
    def mode(self) -> str:
        """The mode that the search is ordered into; "finished" or "not running" if no worker of this host
        would obey."""
        if self._recorded.finished:
            return "finished"
        return self._orders.read().mode if trains_here(self._folder) else "not running"

    def standing(self) -> Standing:
        """The present state of the search."""
        return self._patience(lambda: read_standing(self._study))

    def status(self) -> list[str]:
        """The present state of the search, as lines of text."""
        ordered, mode, standing = self._orders.read().mode, self.mode, self.standing()
        lift = f" {self._command_on('control', 'resume')} ends the pause."
        if mode == "finished":
            first = f"{self._name} is finished."
        elif mode == "not running":
            first = f"{self._name} is not running."
            first += "" if ordered == "running" else f" Pending: {ordered}."
            first += lift if ordered == "paused" else ""
        elif mode == "paused":
            left = sum(each.state == JobState.RUNNING for each in standing.trials)
            still = f"is being paused: {counted(left, 'trial')} still running, to the end of the step"
            first = f"{self._name} {still if left else 'is paused'}.{lift}"
        else:
            first = f"{self._name} is {mode}."
        more = f"{self._command_on('leaderboard')} shows its trials"
        last = f"{more}, {self._command_on('resume')} resumes it." if mode == "not running" else f"{more}."
        rows = [f"  {row}" for row in self._processes()]
        return [first, *standing.describe(), *rows, last]

    def facts(self) -> dict[str, object]:
        """The same as plain data for programs."""
        rows = [row.facts() for row in self._processes()]
        return {"search": self._name, "mode": self.mode} | self.standing().facts() | {"processes": rows}

    def _processes(self) -> list[ProcessRow]:
        """How the processes of its runs on this host are doing, where a run has several."""
        return read_processes(self._folder, map(process_id, living(self._folder / WORKERS)))

    # ---- orders --------------------------------------------------------------------------------------------

    def order(self, verb: str) -> str:
        """Pause, resume, stop or cancel the whole search; return in words what will happen."""
        mode, text = _MODES[verb]
        if self._orders.read().mode == mode:
            if mode != "running" or trains_here(self._folder):
                return f"The search is already {mode}."
            return self._when("The search is not paused.")
        self._orders.set_mode(mode)
        return self._when(text.format(self._command_on("control", "resume")))

    def stop_trial(self, number: int) -> str:
        """End one trial; return in words what will happen.

        Raises:
            SearchError: there is no such trial, or it does not run.
        """
        self._check_target("stop", number)
        self._orders.stop_trial(number)
        return self._when(f"Trial {number} ends after the current step.")

    def _when(self, text: str) -> str:
        """The answer, with a note on what delays it."""
        if trains_here(self._folder):
            return text
        hosts = self.standing().elsewhere
        if hosts:
            return (
                f"{text} No worker of the search runs on this host; its workers are on {' and '.join(hosts)}."
            )
        return (
            f"{text} It is not running now; this takes effect when {self._command_on('resume')} resumes it."
        )

    # ---- further trials ------------------------------------------------------------------------------------

    def add(self, overrides: Sequence[str], check: Check | None = None) -> str:
        """Add a trial with these values, the others suggested by the sampler; return in words what will
        happen.

        Args:
            check: raises what is wrong with the trial's overrides.

        Raises:
            ConfigError: a value is invalid for any job.
            SearchError: a key applies to the whole search.
            InputError: as ``check``.
        """
        return self._enqueue(self._new_point(None, overrides, check), None, uuid4().hex)

    def clone(
        self, number: int, overrides: Sequence[str], check: Check | None = None, *, warm: bool = False
    ) -> str:
        """Add a trial with the values of another, changed by overrides; return in words what will happen.

        Args:
            check: as for ``add``.
            warm: start from the other's newest saved weights.

        Raises:
            ConfigError: a value is invalid for any job.
            SearchError: there is no such trial, it has no weights, or a key applies to the whole search.
            InputError: as ``check``.
        """
        self._check_target("clone", number)
        trial = self._patience(self._shared.trials)[number]
        request, weights = uuid4().hex, None
        for override in overrides if warm else ():
            if key_of(override) in SHAPE:
                raise SearchError(
                    f"--warm {override}",
                    "A warm start cannot change rank, target modules or variant of the adapter.",
                    "Leave out this key, or clone without --warm.",
                )
        point = self._new_point(trial, overrides, check)  # before anything is copied
        if warm:
            token = str(self._study.user_attrs[TOKEN])
            weights = keep_weights(self._folder, token, state_of(trial), number, request)
        return self._enqueue(point, weights, request)

    def _new_point(
        self, source: FrozenTrial | None, overrides: Sequence[str], check: Check | None
    ) -> tuple[AddedPoint, int | None]:
        """The checked settings of ``source``, if given, changed by overrides, and the trial's own
        priority."""
        added, priority = self._read(overrides)
        given = added.values.keys() | added.outside.keys()
        kept = {} if source is None else source.params
        values = {key: value for key, value in kept.items() if key not in given} | dict(added.values)
        before = {} if source is None else outside_of(source)
        outside = {key: each for key, each in before.items() if key not in given} | dict(added.outside)
        if check is not None:
            suggested = next(self._space.probes(), {})  # by the sampler, later: any will do
            check(overrides_of(self._space, suggested | values, outside))
        return AddedPoint(values, outside), priority

    def _enqueue(self, point: tuple[AddedPoint, int | None], weights: Path | None, request: str) -> str:
        added, priority = point
        number = self._shared.locked(
            lambda: enqueue(
                self._study,
                dict(added.values),
                request=request,
                warm_from=weights,
                priority=priority,
                outside=dict(added.outside),
            )
        )
        preempts = "" if priority is None else ", or a trial of lower priority is preempted"
        starts = f"Trial {number} is queued. It starts as soon as a slot is free{preempts}."
        if added.outside:
            words = " ".join(f"{key}={each.text}" for key, each in added.outside.items())
            verb = "lie" if len(added.outside) > 1 else "lies"
            starts += f" {words} {verb} outside the search space: the sampler does not learn from this trial."
        if self._orders.read().mode == "paused":
            starts += f" The search is paused: run {self._command_on('control', 'resume')} first."
        return self._when(starts)

    def _read(self, overrides: Sequence[str]) -> tuple[AddedPoint, int | None]:
        """The settings that overrides give, and the trial's own priority."""
        rest, priority = self._priority(overrides)
        added = read_added(self._space, rest)
        if added.outside and self._recorded.verb == "train":
            raise SearchError(
                " ".join(rest),
                "`plait train` trains one adapter, with the settings of its command.",
                "Start another `plait train` with these settings.",
            )
        return added, priority

    def _priority(self, overrides: Sequence[str]) -> tuple[list[str], int | None]:
        """The other overrides, and the trial's own priority, which it may have if priority is not
        searched."""
        given = [each for each in overrides if key_of(each) == PRIORITY_KEY]
        if not given or any(dimension.name == PRIORITY_KEY for dimension in self._space.dimensions):
            return list(overrides), None
        try:
            return [each for each in overrides if each not in given], int(given[-1].partition("=")[2])
        except ValueError:
            raise SearchError(
                given[-1], "A priority must be a whole number.", f"Give {PRIORITY_KEY}=5."
            ) from None

    @property
    def _space(self) -> Space:
        return self._patience(lambda: read_space(self._study))

    # ---- which trial ---------------------------------------------------------------------------------------

    def _check_target(self, verb: str, number: int) -> None:
        """Check that a trial to be stopped has begun and not ended, and that one to be cloned has begun.

        Raises:
            SearchError: there is no such trial, or it is not of this kind.
        """
        states = [trial.state for trial in self.standing().trials]
        remedy = f"{self._command_on('leaderboard')} shows the trials and their states."
        if not 0 <= number < len(states):
            raise SearchError(f"trial {number}", "There is no such trial in this search.", remedy)
        state = states[number]
        if state == JobState.QUEUED or (verb == "stop" and state.ended):
            able = "and not ended can be stopped" if verb == "stop" else "can be cloned"
            rule = f"Only a trial that has started {able}."
            raise SearchError(f"trial {number} is {state}", rule, remedy)


def _opened(recorded: RecordedCommand, root: Path, *, wait: bool) -> Study:
    """The study of a search.

    Args:
        wait: raise the storage's own error if it may be temporary, so that the call is repeated.
    """
    try:
        return stored_study(recorded.storage, root, recorded.name)
    except StorageError as error:
        if wait and isinstance(cause := error.__cause__, Exception) and passes(cause):
            raise cause from error
        raise

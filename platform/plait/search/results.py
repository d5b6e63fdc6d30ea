"""The result of a search, as lines to print and in the file format of Hydra's Optuna sweeper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from plait.core.errors import EXIT_DONE, EXIT_FAILED_JOBS, EXIT_INTERRUPTED
from plait.core.lifecycle import JobResult, JobState
from plait.core.objectives import Objective, front_of
from plait.core.settings import SearchSettings
from plait.utils.counts import counted
from plait.utils.files import disk_errors

RESULT_FILE = "optimization_results.yaml"
TRY_ALL = "search.max_failure_rate=1"  # with it, a search never gives up
MOST_REJECTED = 100  # suggestions in a row that break a constraint, after which the search ends


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """All trials that have ended, and whether the search ended early.

    Attributes:
        interrupted: whether it was interrupted by Ctrl-C or the end of its process.
        ended_by: what keeps it from its end: the user's order ("stopping", "cancelling", "paused" if it was
            interrupted in a pause), or "failing" if too many trials failed; "" if all trials have ended.
        why: the same, in words.
        name: the search's name in its study.
    """

    finished: tuple[JobResult, ...]
    interrupted: bool = False
    ended_by: str = ""
    why: str = ""
    name: str = ""

    def count(self, state: JobState) -> int:
        """How many trials ended in this state."""
        return sum(item.state == state for item in self.finished)

    @property
    def rejected_to_the_end(self) -> str:
        """The message that no more trials are suggested because the last ones all broke a constraint; "" if
        they did not."""
        last = sorted(self.finished, key=lambda item: item.trial)[-MOST_REJECTED:]
        if len(last) < MOST_REJECTED or any(item.state != JobState.INFEASIBLE for item in last):
            return ""
        return f"the last {MOST_REJECTED} suggestions all break a constraint"

    @property
    def exit_status(self) -> int:
        """0 done, 3 finished with failed jobs, 130 interrupted."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILED_JOBS if self.count(JobState.FAILED) else EXIT_DONE

    def front(self, objectives: Sequence[Objective]) -> list[JobResult]:
        """The Pareto front; of one objective, the best trials."""
        return front_of(self.finished, objectives)


def failure_limit(failed: int, total: int, settings: SearchSettings) -> str:
    """The message that no further trials are suggested because too many failed; "" if they did not."""
    if failed <= settings.max_failure_rate * total:
        return ""
    share = f"search.max_failure_rate={settings.max_failure_rate:g}"
    return f"{failed} of {counted(total, 'trial')} failed, more than {share} allows"


def describe_given_up(why: str, name: str) -> str:
    """Describe why a search gave up, and how to resume it."""
    remedy = f"{TRY_ALL} resumes it; with search.failed=retry the failed trials are also tried again."
    return f"{name} ended early: {why}. {remedy}"


def describe_result(
    result: SearchEnd, settings: SearchSettings, name: str, shows: str, *, exhausted: bool
) -> list[str]:
    """Describe a finished search in a few lines; ``shows``: the command that shows its trials;
    ``exhausted``: its space has no untried point."""
    count, failed = len(result.finished), result.count(JobState.FAILED)
    lines = [f"{name} is finished: {counted(count, 'trial')}, {failed} failed"]
    for state in (JobState.STOPPED, JobState.INFEASIBLE):
        lines[0] += f", {number} {state}" if (number := result.count(state)) else ""
    lines[0] += "."
    more = "search.fresh=true starts it again"
    front = result.front(settings.objectives)
    searched = any(item.parameters for item in result.finished)
    if exhausted and searched:
        lines[0] += " Every point of the search space has been tried."
    elif why := result.rejected_to_the_end:
        lines[0] += f" No more are suggested: {why}."
    elif front and searched:
        more += ", search.trials=N adds to it"
    if len(settings.objectives) > 1 and front:
        lines.append(f"Pareto front, {' and '.join(map(str, settings.objectives))}:")
        lines += [f"  {describe_point(item, settings.objectives)}" for item in front]
    elif front:
        lines.append(f"Best: {describe_point(front[0], settings.objectives)}")
    elif settings.limits and any(not item.feasible for item in result.finished):
        lines.append(f"No trial satisfies {' and '.join(map(str, settings.limits))}.")
    return [*lines, f"{more}; `{shows}` shows it."]


def describe_point(item: JobResult, objectives: Sequence[Objective]) -> str:
    """A trial's name, objectives and values."""
    pairs = zip(objectives, item.values, strict=True)
    figures = " ".join(f"{objective.metric} {value:.6g}" for objective, value in pairs)
    values = " ".join(f"{key}={short(value)}" for key, value in item.parameters.items())
    return " ".join(part for part in (f"{item.job},", figures, values) if part)


def short(value: object) -> str:
    """A setting for people to read, without the last digits of a number; a list as in an override."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(short, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_result(result: SearchEnd, settings: SearchSettings, folder: Path) -> None:
    """Write the best trial, or the Pareto front of several objectives, as YAML into Hydra's run folder, with
    the keys of the Optuna sweeper.

    Raises:
        StorageError: it cannot be written.
    """
    front = result.front(settings.objectives)
    content: dict[str, object] = {"name": "plait"}
    if len(settings.objectives) > 1:
        content["solutions"] = [
            {"params": dict(item.parameters), "values": list(item.values)} for item in front
        ]
    else:
        content["best_params"] = dict(front[0].parameters) if front else {}
        content["best_value"] = front[0].objective if front else None
    content |= {"trials": len(result.finished), "failed": result.count(JobState.FAILED)}
    file = folder / RESULT_FILE
    remedy = "Free some space, or choose another folder with hydra.sweep.dir=FOLDER."
    with disk_errors(file, "Plait writes the result of the search there.", remedy):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

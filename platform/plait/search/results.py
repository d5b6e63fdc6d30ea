"""What a search came to, as lines to print and as the file that users of the Optuna sweeper know."""

from __future__ import annotations

from pathlib import Path

import yaml

from plait.errors import StorageError
from plait.search.run import SearchResult
from plait.search.trials import Finished
from plait.settings import SearchSettings

RESULT_FILE = "optimization_results.yaml"


def describe_result(result: SearchResult, settings: SearchSettings, name: str) -> list[str]:
    """A finished search in a few lines."""
    count = len(result.finished)
    lines = [f"{name} is finished: {count} trial{'s' if count != 1 else ''}, {result.failed} failed."]
    more = "search.fresh=true starts it anew"
    front = result.front(settings.objectives)
    searched = any(item.trial.values for item in result.finished)
    if front and searched:
        more += ", search.trials=N adds to it"
    if len(settings.objectives) > 1 and front:
        lines.append(f"Pareto front, {' and '.join(map(str, settings.objectives))}:")
        lines += [f"  {_point(item, settings)}" for item in front]
    elif front:
        lines.append(f"Best: {_point(front[0], settings)}")
    elif settings.limits and any(not item.outcome.feasible for item in result.finished):
        lines.append(f"No trial keeps {' and '.join(map(str, settings.limits))}.")
    return [*lines, f"{more}; `plait leaderboard` shows it."]


def _point(item: Finished, settings: SearchSettings) -> str:
    """A trial's name, objectives and values."""
    pairs = zip(settings.objectives, item.outcome.values, strict=True)
    figures = " ".join(f"{objective.metric} {value:.6g}" for objective, value in pairs)
    values = " ".join(f"{key}={value}" for key, value in item.trial.values.items())
    return " ".join(part for part in (f"{item.trial.name},", figures, values) if part)


def write_result(result: SearchResult, settings: SearchSettings, folder: Path) -> None:
    """Write the best trial, or the Pareto front of several objectives, as YAML into Hydra's folder of the
    run: the keys are those of the Optuna sweeper.

    Raises:
        StorageError: it cannot be written.
    """
    front = result.front(settings.objectives)
    content: dict[str, object] = {"name": "plait"}
    if len(settings.objectives) > 1:
        content["solutions"] = [
            {"params": dict(item.trial.values), "values": list(item.outcome.values)} for item in front
        ]
    else:
        content["best_params"] = dict(front[0].trial.values) if front else {}
        content["best_value"] = front[0].outcome.value if front else None
    content |= {"trials": len(result.finished), "failed": result.failed}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{folder / RESULT_FILE}: {error.strerror or error}",
            "The result of a search is written there.",
            "Free some space, or choose another folder with hydra.sweep.dir=FOLDER.",
        ) from error

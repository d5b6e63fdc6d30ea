"""What a search came to, as lines to print and as the file that users of the Optuna sweeper know."""

from __future__ import annotations

from pathlib import Path

import yaml

from plait.errors import StorageError
from plait.search.run import SearchResult
from plait.settings import SearchSettings

RESULT_FILE = "optimization_results.yaml"


def describe_result(result: SearchResult, settings: SearchSettings, name: str) -> list[str]:
    """A finished search in a few lines."""
    count = len(result.finished)
    lines = [f"{name} is finished: {count} trial{'s' if count != 1 else ''}, {result.failed} failed."]
    best = result.best(settings.direction)
    more = "search.fresh=true starts it anew"
    if best is not None and best.outcome.value is not None:
        values = " ".join(f"{key}={value}" for key, value in best.trial.values.items())
        figure = f"{settings.metric} {best.outcome.value:.6g}"
        lines.append(" ".join(part for part in (f"Best: {best.trial.name},", figure, values) if part))
        more += ", search.trials=N adds to it" if values else ""
    return [*lines, f"{more}; `plait leaderboard` shows it."]


def write_result(result: SearchResult, direction: str, folder: Path) -> None:
    """Write the best trial as YAML into Hydra's folder of the run.

    Raises:
        StorageError: it cannot be written.
    """
    best = result.best(direction)
    content = {
        "name": "plait",
        "best_params": {} if best is None else dict(best.trial.values),
        "best_value": None if best is None else best.outcome.value,
        "trials": len(result.finished),
        "failed": result.failed,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{folder / RESULT_FILE}: {error.strerror or error}",
            "The result of a search is written there.",
            "Free some space, or choose another folder with hydra.sweep.dir=FOLDER.",
        ) from error

"""What is known of a search before its first job, and the tags of its run."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from plait import __version__
from plait.core.lifecycle import JobState
from plait.core.settings import RunSettings
from plait.tracking import names
from plait.tracking.facts import GitState
from plait.tracking.values import user
from plait.utils.addresses import redact


@dataclass(frozen=True, slots=True)
class SearchFacts:
    """What is known of a search before its first job.

    Attributes:
        name: identity of the search.
        settings: of the run.
        config: resolved configuration, YAML.
        command: the command line, program first.
        overrides: as Hydra received them.
        fresh: do not go on with an earlier search of this name.
        study: what tells this search from an earlier one of its name; "" where nothing does.
    """

    name: str
    settings: RunSettings
    config: str = ""
    command: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    fresh: bool = False
    study: str = ""


def search_tags(search: SearchFacts, git: GitState) -> dict[str, str]:
    """Tags of a search's run as it begins or goes on."""
    objectives = search.settings.search.objectives
    tags = {
        names.TAG_SEARCH: search.name,
        names.TAG_STATE: JobState.RUNNING,
        names.TAG_DIRECTION: objectives[0].direction,
        names.TAG_METRIC: objectives[0].metric,
        "plait.version": __version__,
        "plait.command": redact(shlex.join(search.command)),
        "mlflow.user": user(),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": Path(search.command[0]).name if search.command else "plait",
    }
    if len(objectives) > 1:
        tags[names.TAG_OBJECTIVES] = json.dumps([(each.metric, each.direction) for each in objectives])
    if search.study:
        tags[names.TAG_STUDY] = search.study
    if git.commit:
        tags |= {"mlflow.source.git.commit": git.commit, "mlflow.source.git.branch": git.branch}
        tags["plait.git.dirty"] = str(git.dirty).lower()
    return tags

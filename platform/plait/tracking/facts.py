"""What is known about a search before its first job: settings, command, source code, packages, hardware."""

from __future__ import annotations

import getpass
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from plait.core.jobs import DataSpec
from plait.core.lifecycle import JobState
from plait.core.samples import TokenisedData
from plait.core.settings import RunSettings
from plait.core.version import __version__
from plait.tracking import names
from plait.tracking.values import parameter_text
from plait.utils.addresses import redact

LONGEST_DIFF = 1_000_000  # characters


@dataclass(frozen=True, slots=True)
class GitState:
    """Commit of the folder's repository, and the changes since; empty strings outside a repository."""

    commit: str
    branch: str
    dirty: bool
    diff: str


def git_state(folder: Path) -> GitState:
    """The state of the repository around a folder."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return GitState("", "", False, "")
    diff = _git(folder, "diff", "HEAD")
    changed = bool(_git(folder, "status", "--porcelain"))
    return GitState(commit, _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), changed, diff[:LONGEST_DIFF])


def _git(folder: Path, *arguments: str) -> str:
    """The output of git; empty if there is no git or no repository."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def packages() -> str:
    """Installed distributions, one ``name==version`` per line, sorted."""
    installed = {_named(item) for item in metadata.distributions()}
    return "\n".join(sorted(installed, key=str.lower)) + "\n"


def _named(item: metadata.Distribution) -> str:
    """Its name and version, from the head of its metadata alone: below that stands a whole page."""
    text = item.read_text("METADATA") or item.read_text("PKG-INFO") or ""
    head = dict(line.partition(": ")[::2] for line in text.partition("\n\n")[0].splitlines())
    return f"{head.get('Name')}=={head.get('Version')}"


def hardware() -> dict[str, Any]:
    """The machine. Devices are listed only if torch is already imported."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
        facts["devices"] = [{"name": item.name, "memory_bytes": item.total_memory} for item in devices]
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


@dataclass(frozen=True, slots=True)
class DataFacts:
    """A data set as MLflow shows it: its name, digest, origin and size."""

    name: str
    digest: str
    source: Mapping[str, Any]
    counts: Mapping[str, float]


def data_facts(spec: DataSpec, data: TokenisedData) -> DataFacts:
    """The facts of the data set that a job trains on."""
    options = spec.mapping()
    named = options.get("path") or options.get("task") or options.get("id")
    name = Path(named).name if isinstance(named, str) and named else spec.source
    splits = {"train": data.train, "validation": data.validation}
    counts: dict[str, float] = {"num_rows": len(data.train)}
    for word, split in splits.items():
        counts |= {f"{word}_samples": len(split), f"{word}_tokens": int(split.lengths.sum())}
        left = split.counts
        counts |= {f"{word}_truncated": left.truncated, f"{word}_dropped": left.dropped + left.unlabelled}
    return DataFacts(name, data.digest, {"source": spec.source} | options, counts)


@dataclass(frozen=True, slots=True)
class SearchFacts:
    """What is known about a search before its first job.

    Attributes:
        name: identity of the search.
        settings: settings of the run.
        config: resolved configuration, YAML.
        command: the command line, program first.
        overrides: as Hydra received them.
        study: token that distinguishes this search from an earlier one of its name; "" if there is none.
        searched: searched config keys and groups.
    """

    name: str
    settings: RunSettings
    config: str = ""
    command: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    study: str = ""
    searched: tuple[str, ...] = ()


def artifacts(search: SearchFacts, git: GitState) -> dict[str, str | dict[str, Any]]:
    """Artifacts of a search's run from its beginning, by path."""
    found: dict[str, str | dict[str, Any]] = {
        names.CONFIG_FILE: search.config,
        "overrides.txt": "".join(f"{item}\n" for item in search.overrides),
        "packages.txt": packages(),
        "hardware.json": hardware(),
    }
    return found | ({"git.diff": git.diff} if git.diff else {})


def search_tags(search: SearchFacts, git: GitState) -> dict[str, str]:
    """Tags of a search's run as it begins or is resumed."""
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


def run_parameters(settings: RunSettings) -> dict[str, str]:
    """The run's settings, flattened, without unset ones; addresses without passwords."""
    flat = {
        f"{group}.{key}": value
        for group, values in asdict(settings).items()
        for key, value in values.items()
        if value is not None and value != {} and value != ()
    }
    return {key: redact(parameter_text(value)) for key, value in flat.items()}


def user() -> str:
    """The user name that MLflow's UI shows."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"

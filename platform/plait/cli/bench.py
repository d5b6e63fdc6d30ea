"""`plait bench`: the named searches and benchmarks of sweeps/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from plait.errors import EXIT_DONE, ConfigError, choices
from plait.paths import sweeps_dir


@dataclass(frozen=True, slots=True)
class Named:
    """A file of sweeps/: its name is its path without the suffix."""

    name: str
    mode: str
    description: str


def main(arguments: Sequence[str]) -> int:
    """List what there is, or run NAME as `plait sweep +sweeps=NAME`."""
    if not arguments:
        print(listing(named_sweeps(sweeps_dir())))
        return EXIT_DONE
    from plait.cli.app import run_sweep

    name, *rest = arguments
    if name.startswith("-"):
        return run_sweep(arguments)
    known = [named.name for named in named_sweeps(sweeps_dir())]
    if name not in known:
        near = get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"plait bench {name}",
            "There is no such file in sweeps/.",
            f"{remedy}There are: {choices(known)}.",
        )
    return run_sweep([f"+sweeps={name}", *rest])


def named_sweeps(folder: Path) -> list[Named]:
    """All files of a folder, by name.

    Raises:
        ConfigError: a file is not YAML, or does not say its mode.
    """
    return [_read(path, folder) for path in sorted(folder.rglob("*.yaml"))]


def _read(path: Path, folder: Path) -> Named:
    name = path.relative_to(folder).with_suffix("").as_posix()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"sweeps/{name}.yaml", f"It is not YAML: {error}") from error
    if not isinstance(content, dict) or "mode" not in content:
        raise ConfigError(f"sweeps/{name}.yaml", "It must say its mode: train, simulate or bench.")
    return Named(name, str(content["mode"]), " ".join(str(content.get("description", "")).split()))


def listing(entries: Sequence[Named]) -> str:
    """One line for each, in columns."""
    if not entries:
        return "There is nothing in sweeps/."
    width = max(len(entry.name) for entry in entries)
    lines = [f"  {entry.name:<{width}}  {entry.mode:<8}  {entry.description}" for entry in entries]
    return "\n".join(
        [*lines, "", "Run one with `plait bench NAME`; further arguments are those of `plait sweep`."]
    )

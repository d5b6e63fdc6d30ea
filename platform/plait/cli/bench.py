"""`plait bench`: the named searches and benchmarks of sweeps/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from plait.cli.helps import HELP
from plait.core.errors import EXIT_DONE, ConfigError, choices
from plait.utils.paths import sweeps_dir
from plait.utils.spelling import did_you_mean

FOOTER = (
    "Times are rough, of two cores that do nothing else. train: a search; simulate: nothing is measured;",
    "bench: measured or computed here, as each figure says. `plait bench NAME` runs one, with further",
    "arguments as of `plait sweep`; `plait bench NAME --help` shows its file, with all its options.",
)


@dataclass(frozen=True, slots=True)
class Named:
    """A file of sweeps/: its name is its path without the suffix.

    Attributes:
        takes: how long it roughly takes on two cores, in words; "" where the file does not say.
    """

    name: str
    mode: str
    description: str
    takes: str = ""


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
        raise ConfigError(
            f"plait bench {name}",
            "There is no such file in sweeps/.",
            f"{did_you_mean(name, known)}There are: {choices(known)}.",
        )
    if set(rest) & set(HELP):
        print((sweeps_dir() / f"{name}.yaml").read_text(encoding="utf-8"), end="")
        return EXIT_DONE
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
    description = " ".join(str(content.get("description", "")).split())
    return Named(name, str(content["mode"]), description, str(content.get("takes", "")))


def listing(entries: Sequence[Named]) -> str:
    """One line for each, in columns."""
    if not entries:
        return "There is nothing in sweeps/."
    name = max(len(item.name) for item in entries)
    takes = max(len(item.takes) for item in entries)
    lines = [
        f"  {item.name:<{name}}  {item.mode:<8}  {item.takes:>{takes}}  {item.description}"
        for item in entries
    ]
    return "\n".join([*lines, "", *FOOTER])

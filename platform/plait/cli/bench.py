"""`plait bench`: the named searches and benchmarks of sweeps/, listed or run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from plait.cli.verbs import HELP
from plait.config.build import Config
from plait.core.errors import EXIT_DONE, ConfigError, choices
from plait.search.trials import SearchCommand
from plait.utils.benchmarks import GROUP, PAPERS, RUNNERS
from plait.utils.paths import sweeps_dir
from plait.utils.spelling import did_you_mean

GPU = "GPU"  # as `takes` of a file
DETAILS, JSON, ALL_PAPERS = "--details", "--json", "--papers"
ROOT, USUAL_ROOT = "tracking.root=", "plait-runs"
OWN_FILES = ("--config-dir", "-cd")  # of a folder that has a file of that name in sweeps/
FLAGS = {DETAILS: False, JSON: False}  # flag: whether a value follows
FOOTER = (
    "Times are rough, on two otherwise idle cores; GPU: it needs one, and its time is not known.",
    "train: a search; simulate: simulated, not measured;",
    "bench: measured or computed on this machine. `plait bench NAME` runs one, with the same",
    "arguments as `plait sweep`; `plait bench NAME --help` shows its file, with all its options.",
    "`plait bench --papers` runs all files for papers' figures, and resumes where it was interrupted.",
)
PAPERS_HELP = f"""usage: plait bench {ALL_PAPERS} [{JSON}] [{ROOT}FOLDER]

Runs all files for papers' figures that this machine can run, in some 45 minutes on two cores, and writes
papers.html and papers.md into FOLDER/papers. Interrupted, it resumes with the same command. Default of
FOLDER: {USUAL_ROOT}."""


@dataclass(frozen=True, slots=True)
class Named:
    """A file of sweeps/: its name is its path without the suffix.

    Attributes:
        takes: how long it roughly takes on two cores, in words; "" if the file does not say.
    """

    name: str
    mode: str
    description: str
    takes: str = ""


def sweep_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `plait sweep` that run the benchmark NAME, including the verb's own flags; empty if
    the list or a file is printed.

    Raises:
        ConfigError: sweeps/ has no such file, or an option is unknown.
    """
    if ALL_PAPERS in arguments:
        _run_papers([word for word in arguments if word != ALL_PAPERS])
        return []
    flags = [word for word in arguments if word in FLAGS]
    words = [word for word in arguments if word not in FLAGS]
    if not words:
        entries = named_sweeps(sweeps_dir())
        print(json.dumps([asdict(each) for each in entries], indent=2) if JSON in flags else listing(entries))
        return []
    name, *rest = words
    if name.startswith("-"):
        options = [*FLAGS, ALL_PAPERS, "--help"]
        raise ConfigError(
            name,
            "`plait bench` has no such option.",
            f"{did_you_mean(name, options)}Its options are {choices(options)}; "
            "without a name it lists the benchmarks.",
        )
    if any(word.partition("=")[0] in OWN_FILES for word in rest):
        return [f"+sweeps={name}", *rest, *flags]
    marked = {each.name: " (GPU)" * (each.takes == GPU) for each in named_sweeps(sweeps_dir())}
    if name not in marked:
        begun = [each for each in marked if each.startswith(f"{name.rstrip('/')}/")]
        there = choices([f"{each}{marked[each]}" for each in begun or marked])
        own = "Your own file is FOLDER/sweeps/NAME.yaml: add --config-dir FOLDER."
        raise ConfigError(
            f"plait bench {name}",
            "There is no such search or benchmark.",
            f"Available there: {there}."
            if begun
            else f"{did_you_mean(name, marked)}Available: {there}. {own}",
        )
    if set(rest) & set(HELP):
        print((sweeps_dir() / f"{name}.yaml").read_text(encoding="utf-8"), end="")
        return []
    return [f"+sweeps={name}", *rest, *flags]


def _run_papers(words: Sequence[str]) -> None:
    """Run the files of all figures of the papers.

    Raises:
        ConfigError: an argument other than --json and tracking.root.
    """
    if set(words) & set(HELP):
        print(PAPERS_HELP)
        return
    root = USUAL_ROOT
    for word in words:
        if word.startswith(ROOT):
            root = word.removeprefix(ROOT)
        elif word != JSON:
            raise ConfigError(
                word,
                f"`plait bench {ALL_PAPERS}` takes only {JSON} and {ROOT}FOLDER.",
                f"`plait bench {ALL_PAPERS} --help` explains them.",
            )
    RUNNERS.get(PAPERS)(root, dict.fromkeys(words, ""))


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
        raise ConfigError(f"sweeps/{name}.yaml", f"The file is not valid YAML: {error}") from error
    if not isinstance(content, dict) or "mode" not in content:
        raise ConfigError(f"sweeps/{name}.yaml", "The file must set mode to train, simulate or bench.")
    description = " ".join(str(content.get("description", "")).split())
    return Named(name, str(content["mode"]), description, str(content.get("takes", "")))


def listing(entries: Sequence[Named]) -> str:
    """One line for each, in columns."""
    name = max(len(item.name) for item in entries)
    takes = max(len(item.takes) for item in entries)
    lines = [
        f"  {item.name:<{name}}  {item.mode:<8}  {item.takes:>{takes}}  {item.description}"
        for item in entries
    ]
    return "\n".join([*lines, "", *FOOTER])


def run_benchmark(command: SearchCommand, composed: Config, flags: Mapping[str, str]) -> int:
    """Run the benchmark of a file's mode on the search's jobs, and return the exit status.

    Args:
        flags: --details prints all figures, --json the whole report for programs.

    Raises:
        ConfigError: no package has one, or something is wrong with it.
    """
    mode = str(composed["mode"])
    if not RUNNERS.names():
        raise ConfigError(
            f"mode={mode}",
            f"Nothing runs benchmarks: the installed package has no entry points {GROUP}.",
            "Install Plait again: `make install`, or `pip install --editable .`.",
        )
    RUNNERS.get(mode)(command, composed, flags)
    return EXIT_DONE

"""The command's verbs: Plait's own, and those that other packages add by the entry-point group plait.verbs.

Plait's own are also known without entry points, so that a checkout works before it is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from plait.core.errors import ConfigError, choices
from plait.utils.spelling import did_you_mean

GROUP = "plait.verbs"
Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        target: "module:function"; the function takes the arguments and returns the exit status.
        summary: one line for the list of verbs; empty where only the function's own text tells.
        hydra: whether its arguments are Hydra's, for shell completion.
    """

    name: str
    target: str
    summary: str = ""
    hydra: bool = False

    def load(self) -> Main:
        """Import the function."""
        module, _, function = self.target.partition(":")
        main: Main = getattr(importlib.import_module(module), function)
        return main

    def describe(self) -> str:
        """The summary, or the first line of the function's text."""
        return self.summary or (self.load().__doc__ or "").strip().split("\n")[0]


OWN = (
    Verb(
        "sweep", "plait.cli.main:sweep", "search hyperparameters, training all adapters together", hydra=True
    ),
    Verb("plan", "plait.cli.plan:main", "what a search would take, without training", hydra=True),
    Verb(
        "profile", "plait.cli.profile:main", "measure memory and seconds of a model, and fit them", hydra=True
    ),
    Verb("train", "plait.cli.main:train", "train one adapter", hydra=True),
    Verb("resume", "plait.cli.resume:main", "go on with a search that was killed or interrupted"),
    Verb(
        "bench", "plait.cli.bench:main", "list the searches and benchmarks of sweeps/, or run one", hydra=True
    ),
    Verb("control", "plait.cli.control:main", "pause, stop, add to or ask a search that runs"),
    Verb("ui", "plait.cli.results:ui", "open MLflow's pages on what has been trained"),
    Verb("leaderboard", "plait.cli.results:leaderboard", "a search's adapters, best first"),
    Verb("forget", "plait.cli.forget:main", "take a search away: folder, study and MLflow runs"),
    Verb("export", "plait.cli.results:export", "copy an adapter's PEFT folder out of the store"),
)


def verbs() -> dict[str, Verb]:
    """All verbs by name: Plait's own first, then those of other packages, by name."""
    found = {verb.name: verb for verb in OWN}
    for point in sorted(entry_points(group=GROUP), key=lambda item: item.name):
        found.setdefault(point.name, Verb(point.name, point.value))
    return found


def find(name: str) -> Verb:
    """The verb of a name.

    Raises:
        ConfigError: there is none.
    """
    known = verbs()
    if name not in known:
        meant = did_you_mean(name, known, before="plait ")
        raise ConfigError(f"plait {name}", "There is no such verb.", f"{meant}There are: {choices(known)}.")
    return known[name]

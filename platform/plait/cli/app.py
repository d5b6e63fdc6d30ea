"""Plait as a Hydra application: one for `plait train`, `plait sweep` and `python -m plait`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig

from plait.cli.hydra_errors import explain
from plait.core.errors import EXIT_DONE, ConfigError, PlaitError
from plait.utils.paths import conf_dir
from plait.utils.spelling import did_you_mean

FULL_ERROR = "HYDRA_FULL_ERROR"
# With one of these Hydra shows something and runs nothing.
SHOWS_ONLY = (
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--help",
    "-h",
    "--hydra-help",
    "--shell-completion",
    "-sc",
    "--version",
)


# Hydra's own, in short and long; it takes words for overrides that do not begin with a dash.
OPTIONS = (
    *SHOWS_ONLY,
    *("--resolve", "--package", "-p", "--run", "-r", "--multirun", "-m", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)


class Application:
    """The task that Hydra runs: one job. Under multirun the sweeper takes its place and sets the status."""

    def __init__(self) -> None:
        self.exit_status = EXIT_DONE
        self.error: PlaitError | None = None
        self.__name__ = "plait"

    def __call__(self, config: DictConfig) -> None:
        """Train the one job of ``config``."""
        from plait.cli.training import train

        try:
            self.exit_status = train(config)
        except PlaitError as error:  # Hydra would add lines of its own to an error that passes through it
            self.error = error


def run(program: str, arguments: Sequence[str]) -> int:
    """Run the application as Hydra does from a command line; the exit status.

    Args:
        program: the command's own words, such as "plait sweep"; shown in messages.
        arguments: overrides and Hydra's flags.

    Raises:
        PlaitError: bad input of any kind, Hydra's own complaints included.
    """
    from plait.cli.traces import without_traces

    _check_options(program, arguments)
    application = Application()
    start = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(application)
    with _command_line(program, arguments), _errors_come_through(), without_traces():
        try:
            start()
        except HydraException as error:
            raise explain(error, arguments) from error
        if application.error is not None:
            raise application.error
    return application.exit_status


def run_sweep(arguments: Sequence[str]) -> int:
    """`plait sweep`: the application under multirun.

    Raises:
        PlaitError: as :func:`run`.
    """
    if shows_only(arguments):
        return run("plait sweep", show_space(arguments))
    return run("plait sweep", ["--multirun", *arguments])


def _check_options(program: str, arguments: Sequence[str]) -> None:
    """Refuse an option that Hydra does not have: it would answer with all of its own, and end the process."""
    for word in arguments:
        name, _, value = word.partition("=")
        if name.startswith("-") and name not in OPTIONS:
            given = name.lstrip("-")
            own = did_you_mean(name, OPTIONS) or (f"Did you mean {given}={value}? " if value else "")
            raise ConfigError(
                word,
                f"`{program}` has no such option.",
                f"{own}Settings are KEY=VALUE, without dashes: `{program} --help` lists them.",
            )


def shows_only(arguments: Sequence[str]) -> bool:
    """Whether Hydra is only asked to show something."""
    return any(argument.split("=")[0] in SHOWS_ONLY for argument in arguments)


def show_space(arguments: Sequence[str]) -> list[str]:
    """Swept keys moved into ``search.params``, so that Hydra can show the configuration of a search."""
    from plait.config.overrides import is_sweep

    shown = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        shown.append(_as_parameter(key, value) if is_sweep(argument) else argument)
    return shown


def _as_parameter(key: str, value: str) -> str:
    quoted = value.replace("'", "\\'")
    return f"++search.params={{{key.lstrip('+')}: '{quoted}'}}"


def command_words() -> tuple[str, ...]:
    """The command line that runs now, as one would type it."""
    program, *arguments = sys.argv
    return (*program.split(), *(word for word in arguments if word != "--multirun"))


@contextmanager
def _command_line(program: str, arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``."""
    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _errors_come_through() -> Iterator[None]:
    """Hydra prints errors and exits with status 1, unless it is told not to: then they reach ``main``."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before

"""Plait as a Hydra application, for `plait train`, `plait sweep`, its other modes and `python -m plait`."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from plait.cli.hydra_errors import explain, explain_fault, likely_keys
from plait.cli.hydra_globals import VERSION_BASE, own_hydra
from plait.cli.verbs import HELP
from plait.config.build import key_of
from plait.core.errors import EXIT_DONE, FULL_ERROR, ConfigError, PlaitError
from plait.core.settings import TrackingSettings
from plait.utils.paths import conf_dir, search_names, sweeps_dir
from plait.utils.spelling import NEAR, did_you_mean

ROOT = "config"  # the file of conf/ that all commands compose
JOB_LOGGING = "hydra/job_logging"  # the group with which Hydra sets up the process's logging
# With one of these options, Hydra only shows something.
SHOWS_ONLY = (
    *("--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help", "--version"),
    *("--shell-completion", "-sc"),
)
# All options of Hydra, short and long; words that do not begin with a dash are overrides.
OPTIONS = (
    *SHOWS_ONLY,
    *("--resolve", "--package", "-p", "--run", "-r", "--multirun", "-m", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)

NAMED = (  # verbs whose first word is the name of a search
    *("chat", "control", "eval", "export", "forget", "generate", "leaderboard", "report", "resume", "serve"),
    *("trace", "ui"),
)


class Application:
    """The task function given to Hydra; Plait's sweeper, its only user, runs a search in its place.

    Attributes:
        command: the command line, as typed.
        flags: options of the verb that are not Hydra's, with their values.
    """

    def __init__(self, command: Sequence[str], flags: Mapping[str, str]) -> None:
        self.command = tuple(word for word in command if word != "--multirun")
        self.flags = flags
        self.exit_status = EXIT_DONE
        self.began = False  # until then, Hydra composes
        self.error: PlaitError | None = None
        self.__name__ = "plait"

    def __call__(self, _: DictConfig) -> None:
        """Note that another sweeper called it, to refuse that later, because Hydra would add lines to an
        error here."""
        self.error = _other_sweeper(f"hydra/sweeper: {HydraConfig.get().sweeper._target_}")

    def sweep(self, config: DictConfig, loader: ConfigLoader, arguments: Sequence[str]) -> int:
        """Run the search of ``config`` and return the exit status."""
        from plait.cli.sweeping import sweep

        self.began = True
        self.exit_status = sweep(config, loader, arguments, self.command, self.flags)
        return self.exit_status


class ComposedSearch(Application):
    """Keeps what Hydra composed from a program's overrides, so that the program can use Hydra during the
    search."""

    config: DictConfig
    loader: ConfigLoader
    arguments: Sequence[str]

    def sweep(self, config: DictConfig, loader: ConfigLoader, arguments: Sequence[str]) -> int:
        """Keep the arguments, and let Hydra end."""
        self.began = True
        self.config, self.loader, self.arguments = config, loader, arguments
        return self.exit_status


def run(program: str, arguments: Sequence[str], flags: Mapping[str, str] | None = None) -> int:
    """Run the application as Hydra does from a command line, and return the exit status.

    Args:
        program: the command, such as "plait sweep", for messages.
        flags: options that are not Hydra's.

    Raises:
        PlaitError: bad input of any kind, including Hydra's own errors.
    """
    _check_options(program, arguments)
    _quiet()
    application = Application([*program.split(), *arguments], flags or {})
    start = hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name=ROOT)(application)
    with _command_line(program, arguments), _errors_come_through(), explained(application, arguments):
        start()
    return application.exit_status


def _quiet() -> None:
    """Keep what libraries log from Hydra, which would show it: one says that it has found its fonts; torch,
    how its caches were used, where Ctrl-C came before it had set its own level."""
    for library in ("matplotlib.font_manager", "torch"):
        logging.getLogger(library).setLevel(logging.WARNING)


def compose(overrides: Sequence[str]) -> ComposedSearch:
    """The search of these overrides, composed as by `plait sweep`, from within a program, whose arguments,
    logging and global state of Hydra do not change.

    Raises:
        PlaitError: bad input of any kind, including Hydra's own errors.
    """
    for word in overrides:
        if word.startswith("-"):
            raise ConfigError(word, "It is an option of the command line.", "Overrides are KEY=VALUE.")
    _check_sweeper(overrides)
    search = ComposedSearch(["plait", "sweep", *overrides], {})
    silent = [] if JOB_LOGGING in map(key_of, overrides) else [f"{JOB_LOGGING}=none"]
    with own_hydra() as here, explained(search, overrides):
        here.multirun(ROOT, search, [*overrides, *silent], with_log_configuration=False)
    return search


@contextmanager
def explained(application: Application, arguments: Sequence[str]) -> Iterator[None]:
    """Raise Hydra's errors in Plait's form, and errors that the application could not raise inside Hydra."""
    try:
        yield
    except HydraException as error:
        raise explain(error, arguments) from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], f"Found at {error.full_key}.") from error
    except MarkedYAMLError as error:
        where = "" if (mark := error.problem_mark) is None else f"{mark.name}, line {mark.line + 1}: "
        raise ConfigError(
            f"{where}{error.problem}", "A configuration file must be YAML.", "Correct it there."
        ) from error
    except (ValueError, TypeError, AttributeError, AssertionError) as error:  # Hydra's own faults
        if isinstance(error, PlaitError) or application.began:
            raise
        raise explain_fault(error, arguments) from error
    if application.error is not None:
        raise application.error


def run_sweep(verb: str, own: Mapping[str, bool], arguments: Sequence[str]) -> int:
    """Run the application under multirun: a search, one job ("train"), or a plan or profile of a search.

    Args:
        verb: the verb; also the configuration's ``mode``, unless it trains.
        own: the verb's own flags, and whether a value follows each.

    Raises:
        PlaitError: as for :func:`run`.
    """
    given, flags = split_flags(arguments, own)
    if shows_only(given):
        shown = show_space(given, one_job=verb == "train")
        return _help(f"plait {verb}", shown) if set(given) & set(HELP) else run(f"plait {verb}", shown)
    _check_sweeper(given)
    words = given if verb in ("sweep", "train") else [*given, f"mode={verb}"]
    if any(word.startswith("-") or word.startswith("hydra.mode=") for word in given):
        return run(f"plait {verb}", ["--multirun", *words], flags)
    return _multirun(f"plait {verb}", words, flags)


def run_bench(arguments: Sequence[str]) -> int:
    """List the named searches and benchmarks, or run one."""
    from plait.cli.bench import FLAGS, sweep_arguments

    words = sweep_arguments(arguments)
    return run_sweep("sweep", FLAGS, words) if words else EXIT_DONE


def _multirun(program: str, overrides: Sequence[str], flags: Mapping[str, str]) -> int:
    """Do what :func:`run` does with ``--multirun`` and no other option; for the mode, which is known, Hydra
    would compose everything once more."""
    application = Application([*program.split(), *overrides], flags)
    _quiet()
    with own_hydra() as here, explained(application, overrides):
        here.multirun(ROOT, application, [*overrides, "hydra.mode=MULTIRUN"])
    return application.exit_status


def _help(program: str, arguments: Sequence[str]) -> int:
    """Show Hydra's help, with what each key means."""
    from plait.cli.key_help import with_comments

    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):  # of Hydra, which has shown it
        run(program, arguments)
    before, settings, after = text.getvalue().partition("\nSettings ")
    print(f"{before}{settings}{with_comments(after)}", end="", flush=True)
    return EXIT_DONE


def _check_sweeper(arguments: Sequence[str]) -> None:
    for word in arguments:
        if word.startswith("hydra/sweeper=") and word != "hydra/sweeper=plait":
            raise _other_sweeper(word)


def _other_sweeper(value: str) -> ConfigError:
    return ConfigError(
        value,
        "Only Plait's own sweeper trains the adapters of a search together.",
        "Leave hydra/sweeper out; search.sampler=grid tries every combination.",
    )


def split_flags(arguments: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], dict[str, str]]:
    """Separate Hydra's arguments from the verb's own flags: ``--flag value`` and ``--flag=value``."""
    given: list[str] = []
    flags: dict[str, str] = {}
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if own.get(name):
            flags[name] = value if equals else (left.pop(0) if left else "")
        elif word in own:
            flags[name] = ""
        else:
            given.append(word)
    return given, flags


def complete(arguments: Sequence[str], verbs: Mapping[str, bool]) -> int:
    """Shell completion: verbs first, then the verb's keys and groups from Hydra.

    Args:
        arguments: those of Hydra's completion script: "-sc" and "install=bash", "uninstall=bash" or
            "query=bash" (or zsh, fish). The script knows only `plait`.
        verbs: all verbs, and whether their arguments are Hydra's.
    """
    if any(argument.startswith("query=") for argument in arguments):
        line = os.environ.get("COMP_LINE", "plait ")
        words = line.split(" ")
        verb = words[1] if words[2:] else ""
        names = sorted(verbs) if not verb else _names(verb) if len(words) == 3 else []
        if names or not verbs.get(verb):
            print(" ".join(name for name in names if name.startswith(words[-1])))
            return EXIT_DONE
        rest = words[3:] if verb == "launch" else words[2:]
        rest = [f"+sweeps={words[2]}", *words[3:]] if verb == "bench" else rest
        os.environ["COMP_LINE"] = " ".join([words[0], *rest])
    return run("plait", arguments)


def _names(verb: str) -> list[str]:
    """The first words after a verb: names of searches, benchmarks or batch systems; none for other verbs."""
    if verb == "launch":
        return ["slurm"]
    if verb == "bench":
        folder = sweeps_dir()
        return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return search_names(TrackingSettings().root) if verb in NAMED else []


def _check_options(program: str, arguments: Sequence[str]) -> None:
    """Refuse options that Hydra does not have, because it would print all of its own and end the process."""
    for word in arguments:
        name, _, value = word.partition("=")
        if name.startswith("-") and name not in OPTIONS:
            option = did_you_mean(name, OPTIONS, cutoff=NEAR)
            keys = [] if option else likely_keys(name.lstrip("-").replace("-", "_"))
            meant = f"Did you mean {' or '.join(f'{key}={value}' for key in keys)}? " if keys else option
            raise ConfigError(
                word,
                f"`{program}` has no such option.",
                f"{meant}Settings are KEY=VALUE, without dashes: `{program} --help` lists them.",
            )


def shows_only(arguments: Sequence[str]) -> bool:
    """Whether Hydra is only asked to show something."""
    return any(argument.split("=")[0] in SHOWS_ONLY for argument in arguments)


def show_space(arguments: Sequence[str], *, one_job: bool = False) -> list[str]:
    """The arguments with swept keys moved into ``search.params``, so that Hydra can show a search; for one
    job they stay, so that Hydra refuses them. A space that is followed by another value of its key is left
    out, as it does not count."""
    from plait.config.overrides import is_sweep, spaces

    shown, counting = [], spaces(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not is_sweep(argument):
            shown.append(argument)
        elif argument in counting:
            shown.append(argument if one_job else _as_parameter(key, value))
    return shown


def _as_parameter(key: str, value: str) -> str:
    quoted = value.replace("'", "\\'")
    return f"++search.params={{{key.lstrip('+')}: '{quoted}'}}"


@contextmanager
def _command_line(program: str, arguments: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv``, which Hydra reads: options first, as it refuses settings on both sides of one."""
    before = sys.argv
    settings = _settings_among(arguments)
    sys.argv = [program, *(word for word in arguments if word not in settings), *settings]
    try:
        yield
    finally:
        sys.argv = before


def _settings_among(arguments: Sequence[str]) -> list[str]:
    """The words that are neither options nor their values; none where Hydra refuses the options."""
    with suppress(SystemExit), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        found: list[str] = get_args_parser().parse_intermixed_args(list(arguments)).overrides
        return found
    return []


@contextmanager
def _errors_come_through() -> Iterator[None]:
    """Set the variable without which Hydra prints errors and exits with status 1, so that they reach
    ``main``."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before

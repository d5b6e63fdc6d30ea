"""What the sweeper plugin does: from Hydra's configuration and overrides to a search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from plait.cli.app import command_words
from plait.cli.compose import TrialComposer, hydra_config, save_all
from plait.cli.sweeper_keys import merge
from plait.cli.traces import keep
from plait.config.build import check_keys, plain, settings_of
from plait.config.overrides import read_request
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.search.command import SearchCommand
from plait.search.objective import check_objectives
from plait.search.points import read_enqueued
from plait.search.samplers import check_sampler
from plait.search.stopping import check_stopping
from plait.search.trials import Trial

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def sweep(config: DictConfig, loader: ConfigLoader, arguments: Sequence[str]) -> int:
    """Run the search, or the benchmark, that a multirun asks for; the exit status.

    Args:
        config: as Hydra composed it without the swept keys.
        loader: Hydra's, for the trials.
        arguments: the overrides, swept ones included.

    Raises:
        InputError: anything that is wrong with them.
    """
    _check_launcher(config)
    composed = search_config(config, arguments)
    settings = settings_of(composed)
    search = settings.search
    request = read_request(
        arguments, search.params, search.default_params, loader, data_keys=composed["data"]
    )
    check_sampler(settings.search, request.space)
    check_stopping(settings.search)
    read_enqueued(settings.search, request.space)
    composer = TrialComposer(loader, config, request.fixed)
    probes = tuple(composer.probe(request.space.overrides(point)) for point in request.space.probes())
    check_objectives(settings.search, probes)

    def make_job(trial: Trial) -> JobSpec:
        keep()  # something is trained from here on
        return composer.job(trial)

    mode = composed["mode"]
    planning = mode in ("plan", "profile")
    command = SearchCommand(
        settings=settings,
        space=request.space,
        base=composer.probe(),
        make_job=composer.unwritten if planning else make_job,
        probes=probes,
        config=OmegaConf.to_yaml(OmegaConf.create(composed)),
        command=command_words(),
        overrides=tuple(arguments),
        directory=Path() if planning else _prepare_directory(config),
    )
    if mode == "plan":
        from plait.cli.plan import run_plan

        return run_plan(command)
    if mode == "profile":
        from plait.cli.profile import run_profile

        return run_profile(command)
    if mode == "train":
        from plait.search.launch import run_search
        from plait.terminal.console import SearchConsole

        return run_search(command, SearchConsole())
    from plait.cli.bench import run_benchmark

    return run_benchmark(command, composed)


def search_config(config: DictConfig, arguments: Sequence[str]) -> dict[str, Any]:
    """The plain configuration, with what was set under ``hydra.sweeper`` in its place under ``search``.

    Raises:
        ConfigError: as ``sweeper_keys.merge``, or a key that does not exist.
    """
    with hydra_config(config):
        composed = plain(config)
    check_keys(composed)
    sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    assert isinstance(sweeper, dict)
    given = {key.removeprefix("search.") for key in _keys(arguments) if key.startswith("search.")}
    composed["search"] = merge({str(key): value for key, value in sweeper.items()}, composed["search"], given)
    return composed


def _keys(arguments: Sequence[str]) -> list[str]:
    parser = OverridesParser.create()
    return [override.get_key_element().lstrip("+~") for override in parser.parse_overrides(list(arguments))]


def _check_launcher(config: DictConfig) -> None:
    target = config.hydra.launcher._target_
    if target != BASIC_LAUNCHER:
        raise ConfigError(
            f"hydra/launcher: {target}",
            "Plait trains all trials together in this process, so there is nothing to launch.",
            "Leave hydra/launcher out.",
        )


def _prepare_directory(config: DictConfig) -> Path:
    """Make the folder of the whole search, with its configuration, and log into it."""
    with hydra_config(config):
        directory = Path(config.hydra.sweep.dir).absolute()
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(directory)
        save_all(directory, {"multirun": config})
        configure_log(config.hydra.job_logging, config.hydra.verbose)
    return directory

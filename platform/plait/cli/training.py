"""`plait train`: the path of a search with a single job."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from plait.cli.app import command_words
from plait.cli.compose import without_passwords
from plait.cli.traces import keep
from plait.config.build import job_of, plain, settings_of
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.space import Space
from plait.search.command import SearchCommand
from plait.search.objective import check_objectives
from plait.search.trials import Trial


def train(config: DictConfig) -> int:
    """Train the one job of a configuration; the exit status.

    Raises:
        InputError: anything that is wrong with it.
    """
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        raise ConfigError(
            f"hydra/sweeper: {hydra.sweeper._target_}",
            "Only Plait's own sweeper trains the adapters of a search together.",
            "Leave hydra/sweeper out; search.sampler=grid tries every combination.",
        )
    if hydra.output_subdir is not None:
        without_passwords(Path(hydra.runtime.output_dir) / hydra.output_subdir)
    composed = plain(config)
    settings = settings_of(composed)
    if composed["mode"] != "train":
        raise ConfigError(
            f"mode={composed['mode']}",
            "`plait train` trains one adapter.",
            "Use `plait bench NAME` for a benchmark.",
        )
    base = job_of("base", composed)
    check_objectives(settings.search, (base,))

    def make_job(trial: Trial) -> JobSpec:
        keep()  # it is trained from here on
        return job_of(trial.name, composed)

    command = SearchCommand(
        settings=settings,
        space=Space(),
        base=base,
        make_job=make_job,
        probes=(base,),
        config=OmegaConf.to_yaml(config, resolve=True),
        command=command_words(),
        overrides=tuple(hydra.overrides.task),
        directory=Path(hydra.runtime.output_dir),
    )
    from plait.search.launch import run_training
    from plait.terminal.console import SearchConsole

    return run_training(command, SearchConsole())

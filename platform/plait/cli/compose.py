"""Composes each trial's configuration with Hydra, and writes it where Hydra's users look for it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from plait.config.build import Config, job_of, key_of, plain
from plait.core.errors import StorageError
from plait.core.jobs import JobSpec
from plait.search.trials import Trial
from plait.utils.addresses import redact


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Sets Hydra's global configuration, which ``${hydra:...}`` reads, for a while."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


class TrialComposer:
    """Makes jobs of trials.

    Args:
        loader: Hydra's.
        master: configuration of the whole search, with its ``hydra`` node.
        fixed: overrides that apply to every trial.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig, fixed: Sequence[str]) -> None:
        self._loader = loader
        self._master = master
        self._fixed = list(fixed)

    def job(self, trial: Trial) -> JobSpec:
        """The job of a trial; its files are written to ``sweep.dir/subdir/.hydra``.

        Raises:
            ConfigError: a value of the trial is wrong.
            StorageError: the files cannot be written.
        """
        composed = self._compose(trial.overrides, trial.number)
        job = job_of(trial.name, self._plain(composed))
        self._write(composed)
        return job

    def unwritten(self, trial: Trial) -> JobSpec:
        """The job of a trial, without files.

        Raises:
            ConfigError: a value of the trial is wrong.
        """
        return job_of(trial.name, self._plain(self._compose(trial.overrides, trial.number)))

    def probe(self, overrides: Sequence[str] = ()) -> JobSpec:
        """The job that these overrides would give; writes nothing.

        Raises:
            ConfigError: a value is wrong.
        """
        return job_of("probe", self._plain(self._compose(overrides, 0)))

    def _compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        composed = self._loader.load_sweep_config(self._master, [*self._fixed, *overrides])
        with open_dict(composed):
            composed.hydra.job.num = number
            composed.hydra.job.id = f"{composed.hydra.job.name}-{number}"
        return composed

    @staticmethod
    def _plain(composed: DictConfig) -> Config:
        with hydra_config(composed):
            return plain(composed)

    @staticmethod
    def _write(composed: DictConfig) -> None:
        with hydra_config(composed):
            directory = Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)
            with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
                composed.hydra.runtime.output_dir = str(directory.absolute())
            job_config = copy.deepcopy(composed)
            with read_write(job_config), open_dict(job_config):
                del job_config["hydra"]
            hydra_only = OmegaConf.masked_copy(composed, "hydra")
            if composed.hydra.output_subdir is None:
                return
            files = {"config": job_config, "hydra": hydra_only, "overrides": composed.hydra.overrides.task}
            save_all(directory / composed.hydra.output_subdir, files)


def without_passwords(folder: Path) -> None:
    """Remove the passwords from the addresses in what Hydra itself has written about a run.

    Raises:
        StorageError: the files cannot be written.
    """
    try:
        for path in folder.glob("*.yaml"):
            text = path.read_text(encoding="utf-8")
            if redact(text) != text:
                path.write_text(redact(text), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror or error}",
            "Plait stores the run's configuration there, without passwords.",
            "Free some space, or choose another folder with hydra.run.dir=FOLDER.",
        ) from error


def check_folder(folder: Path) -> None:
    """Check that a folder can be made or written, without making it.

    Raises:
        StorageError: it cannot.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise _not_written(folder, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise _not_written(folder, "Permission denied")


def _not_written(folder: Path, reason: str) -> StorageError:
    return StorageError(
        f"{folder}: {reason}",
        "Plait writes each trial's configuration there.",
        "Free some space, or choose another folder with hydra.sweep.dir=FOLDER.",
    )


def save_all(folder: Path, files: dict[str, object]) -> None:
    """Write configurations as YAML files, addresses without passwords.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, node in files.items():
            (folder / f"{name}.yaml").write_text(redact(OmegaConf.to_yaml(node)), encoding="utf-8")
    except OSError as error:
        raise _not_written(folder, error.strerror or str(error)) from error


def remove_unused_folder() -> None:
    """Remove the folder that Hydra made for the present run, where the run has written nothing into it.

    A folder that the user chose stays, and so does one that Hydra shares with other runs.
    """
    config = HydraConfig.get()
    if {key_of(each) for each in config.overrides.hydra} & {"hydra.run.dir", "hydra.sweep.dir"}:
        return
    multirun = config.mode == RunMode.MULTIRUN  # another sweeper's
    folder = Path(config.sweep.dir if multirun else config.runtime.output_dir).absolute()
    inside = sorted(folder.rglob("*"), reverse=True)  # what is in a folder comes before it
    if not all(path.is_dir() or _is_hydras(path) for path in inside):
        return
    with suppress(OSError):  # the folder of the day may hold other runs
        for path in (*inside, folder, *(above for above in folder.parents if Path.cwd() in above.parents)):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def _is_hydras(path: Path) -> bool:
    """Whether Hydra wrote the file when the run began."""
    if path.suffix == ".log":
        return path.stat().st_size == 0
    return path.name == "multirun.yaml" or (path.parent.name == ".hydra" and path.suffix == ".yaml")

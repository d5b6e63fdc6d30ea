"""Turns Hydra's configuration and overrides into a search: many trials for a multirun, one for `plait train`.

A seam: loaded only after Hydra has composed a configuration, so that help and completion do not need Optuna.

``hydra.sweeper.*``, as users of the Optuna sweeper write it, is merged into ``search.*``. By default its keys
are interpolations of ``search``; a plain value in place of one was set by the user.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from plait.config.build import Config, check_keys, job_of, plain, settings_of
from plait.config.overrides import read_request, spaces
from plait.core.errors import ConfigError, choices
from plait.core.jobs import JobSpec
from plait.core.space import Space
from plait.data.loading import check_jobs
from plait.distributed.places import find_place
from plait.search.objective import check_objectives
from plait.search.points import read_enqueued
from plait.search.recorded import quoted
from plait.search.samplers import check_sampler
from plait.search.stopping import check_stopping
from plait.search.trials import SearchCommand, Trial
from plait.utils.addresses import redact
from plait.utils.files import check_writable, disk_errors
from plait.utils.paths import conf_dir, user_path
from plait.utils.progress import say

if TYPE_CHECKING:
    from plait.terminal.view import Screen

# hydra.sweeper's key: search's key.
KEYS = {
    "direction": "direction",
    "storage": "storage",
    "study_name": "name",
    "n_trials": "trials",
    "n_jobs": "parallel",
    "max_failure_rate": "max_failure_rate",
    "params": "params",
    "sampler.name": "sampler",
    "sampler.seed": "seed",
}
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
WRITES = (  # rule and remedy of a folder that cannot be written
    "Plait writes each trial's configuration there.",
    "Free some space, or choose another folder with hydra.sweep.dir=FOLDER.",
)


def sweep(
    config: DictConfig,
    loader: ConfigLoader,
    arguments: Sequence[str],
    words: Sequence[str],
    flags: Mapping[str, str],
) -> int:
    """Run the search, the benchmark or the job that a multirun asks for, and return the exit status.

    Args:
        config: the configuration composed by Hydra without the swept keys.
        arguments: the overrides, including swept ones.
        words: the command line, as typed.
        flags: the verb's own options, with their values.

    Raises:
        InputError: anything wrong with them.
    """
    if words[1:2] == ("train",):
        return _train(config, arguments, words)
    command, composed = search_command(config, loader, arguments, words)
    return _run(composed["mode"], command, composed, flags)


def search_command(
    config: DictConfig, loader: ConfigLoader, arguments: Sequence[str], words: Sequence[str]
) -> tuple[SearchCommand, Config]:
    """The search that a multirun asks for, checked, and its configuration; arguments as for :func:`sweep`.

    Raises:
        InputError: anything wrong with it.
    """
    _check_launcher(config)
    composed = search_config(config, arguments)
    settings = settings_of(composed)
    search = settings.search
    request = read_request(
        arguments, search.params, search.default_params, loader, data_keys=composed["data"]
    )
    check_sampler(search, request.space)
    check_stopping(search)
    composer = TrialComposer(loader, config, request.fixed)
    probes = tuple(composer.probe(request.space.overrides(point)) for point in request.space.probes())
    check_objectives(search, probes)
    read_enqueued(search, request.space)
    with hydra_config(config):
        directory = user_path(config.hydra.sweep.dir).absolute()

    @cache
    def prepare() -> None:
        _prepare_directory(config, directory)

    def make_job(trial: Trial) -> JobSpec:
        prepare()  # only now, so that bad input leaves no folder
        return composer.job(trial)

    trains = composed["mode"] == "train"
    if trains:
        check_folder(directory, settings.tracking.root)
    command = SearchCommand(
        settings=settings,
        space=request.space,
        base=composer.probe(_unset(request.space, composed)),
        make_job=make_job if trains else composer.unwritten,
        probes=probes,
        config=_to_yaml(composed),
        command=tuple(words),
        overrides=_lasting(config, arguments),
        directory=directory,
    )
    return command, composed


def _lasting(config: DictConfig, arguments: Sequence[str]) -> tuple[str, ...]:
    """The overrides with which the search can be composed again: one more for the folders of --config-dir and
    hydra.searchpath, in Hydra's order."""
    given = [each for each in config.hydra.runtime.config_sources if each.provider == "command-line"]
    folders = [f"{each.schema}://{_from_here(Path(each.path))}" for each in given]
    paths = [quoted(each) for each in dict.fromkeys((*folders, *config.hydra.searchpath))]
    return (*arguments, *([f"hydra.searchpath=[{','.join(paths)}]"] if paths else []))


def _from_here(folder: Path) -> Path:
    """Relative to the current folder if it lies inside, so that both can be moved together."""
    here = Path.cwd()
    return folder.relative_to(here) if here in folder.parents else folder


def _unset(space: Space, composed: Config) -> list[str]:
    """A value for each searched key that has none otherwise, because a job must be complete."""
    missing = OmegaConf.missing_keys(OmegaConf.create(dict(composed)))
    first = next(space.probes(), {})
    return [each.override(first[each.name]) for each in space.dimensions if each.name in missing]


def _run(mode: str, command: SearchCommand, composed: Config, flags: Mapping[str, str]) -> int:
    if mode in ("plan", "data", "profile"):
        say("Checking the search, and loading torch and transformers ...")
        if mode != "profile":
            check_jobs(command.probes)
    if mode == "plan":
        from plait.cli.plan import run_plan

        return run_plan(command, flags)
    if mode == "profile":
        from plait.cli.profile import run_profile

        return run_profile(command, flags)
    if mode == "data":
        from plait.cli.data import run_data

        return run_data(command, flags)
    if mode == "train":
        if flags:
            raise ConfigError(
                f"{' '.join(flags)} with mode=train",
                "This is a search, which has no report of figures.",
                f"Leave {' and '.join(flags)} out; `plait leaderboard` prints the results.",
            )
        return _launched(command)
    from plait.cli.bench import run_benchmark

    return run_benchmark(command, composed, flags)


def _train(config: DictConfig, arguments: Sequence[str], words: Sequence[str]) -> int:
    """Train the job of a configuration, as a search with a single trial, and return the exit status.

    Raises:
        InputError: anything wrong with it.
    """
    _check_launcher(config)
    if swept := spaces(arguments):
        raise ConfigError(
            swept[0],
            "`plait train` trains one adapter, with one value for each key.",
            "Use `plait sweep` for several.",
        )
    with hydra_config(config):
        directory = user_path(config.hydra.run.dir).absolute()
    set_output(config, directory)
    composed = search_config(config, arguments)
    settings = settings_of(composed)
    if composed["mode"] != "train":
        raise ConfigError(
            f"mode={composed['mode']}",
            "`plait train` trains one adapter.",
            "Use `plait bench NAME` for a benchmark.",
        )
    base = job_of("base", composed)
    check_objectives(settings.search, (base,))
    check_folder(directory, settings.tracking.root)

    def make_job(trial: Trial) -> JobSpec:
        with hydra_config(config):
            write_job(config, directory)
            configure_log(config.hydra.job_logging, config.hydra.verbose)
        return job_of(trial.name, composed)

    command = SearchCommand(
        settings=settings,
        space=Space(),
        base=base,
        make_job=make_job,
        probes=(base,),
        config=_to_yaml(composed),
        command=tuple(words),
        overrides=_lasting(config, arguments),
        directory=directory,
    )
    return _launched(command, one_job=True)


def _launched(command: SearchCommand, *, one_job: bool = False) -> int:
    """Run a search or one job, or be one of its processes if a launcher says so; the exit status.

    Raises:
        InputError: anything that is wrong with it.
    """
    cluster, place = command.settings.cluster, find_place()
    if place is not None:
        if cluster.processes not in (1, place.processes):
            raise ConfigError(
                f"cluster.processes={cluster.processes} in {place.processes} launched processes",
                "The launcher sets the number of processes.",
                "Leave cluster.processes out.",
            )
        cluster = replace(cluster, processes=place.processes, per_host=place.here)
        command = replace(command, settings=replace(command.settings, cluster=cluster), place=place)
    if place is not None and place.number > 0:
        from plait.distributed.join import join_run

        return join_run(place, cluster)
    screen = _screen()
    check_jobs(command.probes)
    from plait.search.start import run_search, run_training

    run = run_training if one_job else run_search
    return run(command, screen).exit_status


def _screen() -> Screen:
    """The screen of a search, with a line about why nothing happens yet."""
    from plait.terminal.console import SearchConsole
    from plait.terminal.view import Screen

    screen = Screen(SearchConsole())
    screen.say("Checking the search ...")
    return screen


def search_config(config: DictConfig, arguments: Sequence[str]) -> dict[str, Any]:
    """The plain configuration, with values set under ``hydra.sweeper`` moved to ``search``.

    Raises:
        ConfigError: as for :func:`merge`, or a key does not exist.
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


def _prepare_directory(config: DictConfig, directory: Path) -> None:
    """Make the folder of the whole search, with its configuration, and log into it."""
    with hydra_config(config):
        set_output(config, directory)
        save_all(directory, {"multirun": _contents(config)})
        configure_log(config.hydra.job_logging, config.hydra.verbose)


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Set Hydra's global configuration, which ``${hydra:...}`` reads, within the context."""
    held = HydraConfig.instance()
    before = held.cfg
    held.cfg = config  # type: ignore[assignment]  # Hydra's own set_config copies a third of it each time
    try:
        yield
    finally:
        held.cfg = before


class TrialComposer:
    """Makes jobs from trials: each is the search's configuration with the ``fixed`` and the trial's
    overrides."""

    def __init__(self, loader: ConfigLoader, master: DictConfig, fixed: Sequence[str]) -> None:
        self._loader = loader
        self._master = master
        self._fixed = list(fixed)
        self._composed: dict[tuple[str, ...], bytes] = {}  # pickled, which copies faster than deepcopy

    def job(self, trial: Trial) -> JobSpec:
        """The job of a trial; its files are written to ``sweep.dir/subdir/.hydra``.

        Raises:
            ConfigError: a value of the trial is wrong.
            StorageError: the files cannot be written.
        """
        composed = self.compose(trial.overrides, trial.number)
        job = job_of(trial.name, self._plain(composed))
        with hydra_config(composed):
            directory = user_path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)
            write_job(composed, directory.absolute())
        return job

    def unwritten(self, trial: Trial) -> JobSpec:
        """The job of a trial, without files.

        Raises:
            ConfigError: a value of the trial is wrong.
        """
        return job_of(trial.name, self._plain(self.compose(trial.overrides, trial.number)))

    def probe(self, overrides: Sequence[str] = ()) -> JobSpec:
        """The job that these overrides would give, without writing anything.

        Raises:
            ConfigError: a value is wrong.
        """
        return job_of("probe", self._plain(self.compose(overrides, 0)))

    def compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        """The configuration that Hydra would compose; if only values differ, a changed copy, which is ten
        times as fast."""
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        values = [override for override in parsed if _is_value(override)]
        others = tuple(str(override.input_line) for override in parsed if not _is_value(override))
        if others not in self._composed:
            same = not others and self._has_all_fixed()
            self._composed[others] = pickle.dumps(self._master if same else self._load(others))
        composed: DictConfig = pickle.loads(self._composed[others])
        OmegaConf.set_readonly(composed.hydra, False)
        try:
            for override in values:
                OmegaConf.update(composed, override.key_or_group, override.value())
        except OmegaConfBaseException:  # the key does not exist: it is added with a plus, or wrong
            composed = self._load(overrides)
        with read_write(composed), open_dict(composed):
            _set_words(composed.hydra, [*self._fixed, *overrides])
            composed.hydra.job.num = number
            composed.hydra.job.id = f"{composed.hydra.job.name}-{number}"
        return composed

    def _has_all_fixed(self) -> bool:
        """Whether Hydra would compose the search's configuration again: for a multirun it left out the swept
        overrides, and any group without a choice, which is an error for a trial."""
        hydra = self._master.hydra
        given = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
        fixed = [override.input_line for override in given if not override.is_sweep_override()]
        return fixed == self._fixed and not OmegaConf.missing_keys(hydra.runtime.choices)

    def _load(self, overrides: Sequence[str]) -> DictConfig:
        try:
            return self._loader.load_sweep_config(self._master, [*self._fixed, *overrides])
        except ValueError as error:  # Hydra's, for a group whose name is a number
            remedy = "The values of a whole group are the names of its files, as in data=file,jsonl."
            raise ConfigError(" ".join(overrides), str(error), remedy) from error

    @staticmethod
    def _plain(composed: DictConfig) -> Config:
        with hydra_config(composed):
            return plain(composed)


def _is_value(override: Override) -> bool:
    """Whether it sets one key to a plain value, and so cannot change which files are composed."""
    is_key = "." in override.key_or_group and override.package is None and not override.is_delete()
    return is_key and not isinstance(override.value(), (dict, list))


def _set_words(hydra: DictConfig, overrides: Sequence[str]) -> None:
    """Set the overrides of the job's own keys that a configuration is made from."""
    hydra.overrides.task = list(overrides)
    style = hydra.job.config.override_dirname
    hydra.job.override_dirname = get_overrides_dirname(
        OverridesParser.create().parse_overrides(list(overrides)),
        exclude_keys=style.exclude_keys,
        item_sep=style.item_sep,
        kv_sep=style.kv_sep,
    )


def write_job(config: DictConfig, directory: Path) -> None:
    """Write a job's configuration where Hydra's users look for it, without passwords in addresses.

    Raises:
        StorageError: the files cannot be written.
    """
    set_output(config, directory)
    job = _contents(config)
    hydra = job.pop("hydra")
    files = {"config": job, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    subdir = config.hydra.output_subdir
    save_all(directory / (subdir or ""), files if subdir else {})


def set_output(config: DictConfig, directory: Path) -> None:
    """Set the value of ``${hydra:runtime.output_dir}``."""
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(directory)


def check_folder(folder: Path, root: Path) -> None:
    """Check that a folder can be made or written, without making it. Whether ``tracking.root`` can be is
    checked later, with an error of its own.

    Raises:
        StorageError: it cannot.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    root = user_path(root).absolute()
    if folder.is_relative_to(root) and root.is_relative_to(nearest):
        return
    check_writable(folder, str(folder), *WRITES)


def _contents(config: DictConfig) -> dict[str, Any]:
    """What is in a configuration, with interpolations as they are written."""
    contents = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(contents, dict)
    return contents  # type: ignore[return-value]


def _to_yaml(contents: object) -> str:
    """What ``OmegaConf.to_yaml`` gives, which first makes a configuration of the contents, and so is slow."""
    return yaml.dump(
        contents,
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
        Dumper=get_omega_conf_dumper(),
    )


def save_all(folder: Path, files: dict[str, object]) -> None:
    """Write configurations as YAML files, without passwords in addresses.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    with disk_errors(folder, *WRITES):
        folder.mkdir(parents=True, exist_ok=True)
        for name, contents in files.items():
            (folder / f"{name}.yaml").write_text(redact(_to_yaml(contents)), encoding="utf-8")


def merge(sweeper: Mapping[str, Any], search: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """``search`` merged with values set under ``hydra.sweeper``, whose interpolations are not resolved.

    Args:
        given: keys of ``search`` that the command line sets.

    Raises:
        ConfigError: a key is set to different values in both places, or is unknown.
    """
    merged = dict(search)
    for key, value in _set_by_user(sweeper):
        if key in KEYS:
            _merge_one(merged, f"hydra.sweeper.{key}", KEYS[key], value, search, given)
        elif key.startswith("sampler."):
            options = dict(merged.get("sampler_options") or {})
            _merge_option(options, key.removeprefix("sampler."), value)
            merged["sampler_options"] = options
        else:
            raise ConfigError(
                f"unknown key hydra.sweeper.{key}",
                "Plait's sweeper has no such key.",
                f"It has {choices(KEYS)}.",
            )
    return merged


def _set_by_user(sweeper: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat = {key: value for key, value in sweeper.items() if key not in ("_target_", "sampler")}
    flat |= {f"sampler.{key}": value for key, value in dict(sweeper.get("sampler") or {}).items()}
    return [(key, value) for key, value in flat.items() if value is not None and not _is_link(value)]


def _is_link(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${search.")


def _merge_one(
    merged: dict[str, Any],
    theirs: str,
    ours: str,
    value: Any,
    search: Mapping[str, Any],
    given: Collection[str],
) -> None:
    current = search.get(ours)
    if isinstance(value, list) and len(value) == 1:  # direction may be a list there
        value = value[0]
    if value == current:
        return
    if ours in given or current != _defaults()[ours]:
        raise ConfigError(
            f"{theirs}={value!r}, search.{ours}={current!r}",
            "Both are the same setting, so they must not differ.",
            f"Leave one out; search.{ours} is the preferred name.",
        )
    merged[ours] = value


def _merge_option(options: dict[str, Any], name: str, value: Any) -> None:
    if options.setdefault(name, value) != value:
        raise ConfigError(
            f"hydra.sweeper.sampler.{name}={value!r}, search.sampler_options.{name}={options[name]!r}",
            "Both are the same setting, so they must not differ.",
            "Leave one out.",
        )


@cache
def _defaults() -> dict[str, Any]:
    """The values of ``search`` if the user sets nothing."""
    loaded: dict[str, Any] = yaml.safe_load((conf_dir() / "search" / "default.yaml").read_text("utf-8"))
    return loaded

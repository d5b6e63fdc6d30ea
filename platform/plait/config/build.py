"""Converts a composed configuration to frozen dataclasses. Nothing below this module uses Hydra.

``settings_of`` and ``job_of`` take plain nested mappings (``plain`` makes one from Hydra's DictConfig), so
every function here except ``plain`` is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from plait.config.fields import MISSING, build, convert, unknown_key
from plait.core.errors import ConfigError, choices
from plait.core.jobs import AdapterSpec, DataSpec, JobSpec, TrainSpec
from plait.core.settings import ClusterSettings, Mode, RunSettings
from plait.core.space import as_written
from plait.utils.paths import search_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

Config = Mapping[str, Any]

JOB_SPECS: dict[str, type] = {"adapter": AdapterSpec, "train": TrainSpec}
JOB_GROUPS = (*JOB_SPECS, "data")
CLUSTER_KEYS = tuple(each.name for each in fields(ClusterSettings) if each.name != "options")
RUN_GROUPS = tuple(field.name for field in fields(RunSettings))
MODES: tuple[str, ...] = get_args(Mode)
# Keys of a file of sweeps/ that describe it, in addition to the groups.
SWEEP_KEYS = ("mode", "description", "takes", "published", "paper", "bench")


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration without its ``hydra`` node, interpolations resolved; missing values stay "???".

    Raises:
        ConfigError: an interpolation that cannot be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def resolved(key: str) -> Any:
        # Node by node, so that an interpolation still sees the whole configuration, hydra included.
        node = config[key]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node

    try:
        found = {str(key): resolved(str(key)) for key in config if key != "hydra"}
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], f"The error is in {error.full_key}.") from error
    given = {key_of(each) for each in OmegaConf.select(config, "hydra.overrides.task") or ()}
    if "data.source" in given:  # a source without a config group has only the options that are given with it
        known = {"source", *(key.split(".")[1] for key in given if key.startswith("data."))}
        found["data"] = {key: value for key, value in found["data"].items() if key in known}
    return found


def key_of(override: str) -> str:
    """The config key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def check_keys(config: Config) -> None:
    """Check that all top-level keys are known to Plait.

    Raises:
        ConfigError: an unknown key, or a mode that does not exist.
    """
    known = (*JOB_GROUPS, *RUN_GROUPS, *SWEEP_KEYS)
    for key in config:
        if key in known:
            continue
        if isinstance(config[key], Mapping) and set(config[key]) & set(known):
            raise ConfigError(
                f"unknown key {key}",
                "The keys of your own file are those of its group, unless its first line says otherwise.",
                f"For a whole search in {key}/NAME.yaml, begin it with the line `# @package _global_`.",
            )
        raise unknown_key(key, known, ("+sweeps",))
    if config.get("mode", "train") not in MODES:
        raise ConfigError(f"mode={config['mode']!r}", f"mode must be one of {choices(MODES)}.")


def settings_of(config: Config) -> RunSettings:
    """All settings of a run.

    Raises:
        ConfigError: a key or value is wrong.
        StorageError: ``tracking.root`` is not a path, or the search's name is too long for a folder.
    """
    check_keys(config)
    hints = get_type_hints(RunSettings)
    groups: dict[str, Any] = {}
    for name in RUN_GROUPS:
        section = _section(config, name)
        if name == "cluster":
            groups[name] = _cluster(section)
            continue
        if name == "search":
            section = _search(section)
        groups[name] = build(hints[name], section, name)
    settings = RunSettings(**groups)
    search_folder(settings.tracking.root, settings.search.name or "-")  # raises if none can be
    return settings


def job_of(name: str, config: Config) -> JobSpec:
    """One job.

    Raises:
        ConfigError: a key or value is wrong.
    """
    check_keys(config)
    return JobSpec(
        name=name,
        adapter=build(AdapterSpec, _section(config, "adapter"), "adapter"),
        train=build(TrainSpec, _section(config, "train"), "train"),
        data=_data(_section(config, "data")),
    )


def is_whole(key: str) -> bool:
    """Whether a job's config key takes whole numbers only."""
    group, _, name = key.partition(".")
    spec = JOB_SPECS.get(group)
    hint = get_type_hints(spec).get(name) if spec else None
    return hint is int or (get_origin(hint) is not None and set(get_args(hint)) == {int, type(None)})


def takes_list(key: str) -> bool:
    """Whether a run's config key takes a list."""
    group, _, name = key.partition(".")
    spec = get_type_hints(RunSettings).get(group)
    hint = get_type_hints(spec).get(name) if spec else None
    return any(get_origin(each) is tuple for each in (hint, *get_args(hint)))


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A search space by dotted key: nested mappings are flattened, and every value is override text."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{key}.")
        else:
            flat[key] = as_written(value)
    return flat


def _section(config: Config, name: str) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{name}={section!r}", f"{name} is a group of keys.", f"Change one: {name}.KEY=VALUE."
        )
    return {str(key): value for key, value in section.items()}


def _search(section: dict[str, Any]) -> dict[str, Any]:
    """The section with its mappings by dotted key flattened."""
    flat = {}
    for key in ("params", "default_params", "constraints"):
        given = section.get(key) or {}
        if not isinstance(given, Mapping):
            example = "'<= 32'" if key == "constraints" else "'choice(8,16)'"
            raise ConfigError(
                f"search.{key}={given!r}",
                f"search.{key} must be a mapping: KEY: VALUE.",
                f'For example search.{key}="{{adapter.rank: {example}}}".',
            )
        flat[key] = flat_params(given)
    points = section.get("enqueue") or []
    if isinstance(points, (list, tuple)):
        points = [flat_params(point) if isinstance(point, Mapping) else point for point in points]
    return section | flat | {"enqueue": points}


def _data(section: dict[str, Any]) -> DataSpec:
    source = convert(str, section.pop("source", MISSING), "data.source")
    for key, value in section.items():
        convert(Any, value, f"data.{key}")
    return DataSpec.of(source, **section)


def _cluster(section: dict[str, Any]) -> ClusterSettings:
    own = {name: section.pop(name) for name in CLUSTER_KEYS if name in section}
    options = _section({"cluster.options": section.pop("options", {})}, "cluster.options")
    return build(ClusterSettings, own | {"options": options | section}, "cluster")

"""``hydra.sweeper.*``, as users of the Optuna sweeper write it, merged into ``search.*``.

A key of the sweeper reads from ``search`` by an interpolation; where a plain value stands in its place,
somebody set it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import yaml

from plait.core.errors import ConfigError, choices
from plait.utils.paths import conf_dir

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


def merge(sweeper: Mapping[str, Any], search: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """``search`` with what was set under ``hydra.sweeper``.

    Args:
        sweeper: the node as written, interpolations not resolved.
        search: the node, resolved.
        given: keys of ``search`` that the command line sets.

    Raises:
        ConfigError: a key is set in both places, to different values; or one is unknown.
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
            "They are the same setting, so they must not differ.",
            f"Leave one out; search.{ours} is its name here.",
        )
    merged[ours] = value


def _merge_option(options: dict[str, Any], name: str, value: Any) -> None:
    if options.setdefault(name, value) != value:
        raise ConfigError(
            f"hydra.sweeper.sampler.{name}={value!r}, search.sampler_options.{name}={options[name]!r}",
            "They are the same setting, so they must not differ.",
            "Leave one out.",
        )


@cache
def _defaults() -> dict[str, Any]:
    """What ``search`` holds where nobody set anything."""
    loaded: dict[str, Any] = yaml.safe_load((conf_dir() / "search" / "default.yaml").read_text("utf-8"))
    return loaded

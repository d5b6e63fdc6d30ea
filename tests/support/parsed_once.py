"""Lets Hydra parse each file of conf/, sweeps/ and its own package once, and not again for every command."""

from __future__ import annotations

import pickle
from pathlib import Path

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource

ROOT = Path(__file__).resolve().parents[2]
PLACES = (str(ROOT / "conf"), str(ROOT), "hydra.conf")  # the root is where the group sweeps/ is looked for


def parse_once() -> None:
    """Keep what Hydra's sources parse, of which each command gets a copy. Other folders, as tests make them,
    are read again."""
    Plugins.instance()  # registers the sources
    for scheme in ("file", "pkg"):
        _keep(SourcesRegistry.instance().resolve(scheme))


def _keep(source: type[ConfigSource]) -> None:
    parse, kept = source.load_config, dict[tuple[str, str], bytes]()

    def load(self: ConfigSource, config_path: str) -> ConfigResult:
        if self.path not in PLACES:
            return parse(self, config_path)
        key = (self.path, config_path)
        if key not in kept:
            kept[key] = pickle.dumps(parse(self, config_path))
        found: ConfigResult = pickle.loads(kept[key])
        return found

    source.load_config = load  # type: ignore[method-assign]

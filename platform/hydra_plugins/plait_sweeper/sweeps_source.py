"""Makes the files of sweeps/ a config group, ``+sweeps=NAME``, without the rest of its parent folder."""

from __future__ import annotations

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

from plait.utils.paths import conf_dir, sweeps_dir

GROUP = "sweeps"


class SweepsSource(FileConfigSource):
    """The parent folder of sweeps/, of which only sweeps/ is visible."""

    @staticmethod
    def scheme() -> str:
        """The scheme of its paths."""
        return "plait-sweeps"

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file of the group."""
        return super().load_config(config_path)

    def available(self) -> bool:
        """Whether the folder exists."""
        return super().is_group(GROUP)

    def is_group(self, config_path: str) -> bool:
        """Whether it is the root, the group or one of its folders."""
        return _inside(config_path) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Whether it is a file of the group."""
        return _inside(config_path) and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The contents of a folder of the group; for the root, only the group."""
        if config_path.strip("/"):
            return super().list(config_path, results_filter)
        return [GROUP] if results_filter in (None, ObjectType.GROUP) else []


class SweepsSearchPath(SearchPathPlugin):
    """Adds the source to Plait's own search path, not to those of other applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra for every application."""
        if any(item.path in (str(conf_dir()), f"file://{conf_dir()}") for item in search_path.get_path()):
            search_path.append("plait", f"{SweepsSource.scheme()}://{sweeps_dir().parent}")


def _inside(config_path: str) -> bool:
    return config_path.strip("/").split("/")[0] in ("", GROUP)

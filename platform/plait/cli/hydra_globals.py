"""Saves and restores Hydra's global state, because a notebook may use Hydra, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

from plait.utils.paths import conf_dir

VERSION_BASE = "1.3"  # of Hydra's behaviour


@contextmanager
def own_hydra() -> Iterator[Hydra]:
    """A Hydra with Plait's configuration, temporarily replacing an existing one."""
    version, job = VersionBase.instance(), JobRuntime.instance()
    before = version.version_base, job.get("name"), HydraConfig.instance().cfg, GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), job_name="plait", version_base=VERSION_BASE):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            yield hydra
    finally:
        version.version_base, name, HydraConfig.instance().cfg, GlobalHydra.instance().hydra = before
        job.set("name", name)

"""The sweeper that Hydra finds. It calls ``plait.cli``, and imports nothing heavy, so that finding it is
quick."""

from __future__ import annotations

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PlaitSweeper(Sweeper):
    """Trains all trials of a search jointly. Its settings are ``search.*`` (see conf/hydra/sweeper)."""

    def __init__(self, **_settings: Any) -> None:
        """Ignore the settings: they are read from the whole configuration, which still shows who set them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep Hydra's arguments."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def sweep(self, arguments: list[str]) -> int:
        """Run the search and return the exit status."""
        from plait.cli.app import Application

        assert self.config is not None
        assert self.hydra_context is not None
        application = self.task_function  # of Plait's own command; it keeps the status, which Hydra drops
        if not isinstance(application, Application):
            application = Application(["plait", "sweep", *arguments], {})
        return application.sweep(self.config, self.hydra_context.config_loader, arguments)

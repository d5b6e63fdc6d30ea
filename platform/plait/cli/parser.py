"""The parser of the verbs that are not Hydra's: its errors are those of all commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from plait.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments as a ConfigError, which is printed like any other: without passwords."""

    def error(self, message: str) -> NoReturn:
        """Raise it, with the usage as the rule."""
        raise ConfigError(message, self.format_usage().strip(), f"`{self.prog} --help` explains them.")

"""The parser of the verbs that are not Hydra's: its errors are those of all commands."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from plait.core.errors import ConfigError
from plait.core.settings import TrackingSettings
from plait.utils.paths import as_path
from plait.utils.spelling import did_you_mean

STORE_KEY = re.compile(r"^tracking\.(uri|root|experiment)=")


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments as a ConfigError, which is printed like any other: without passwords.

    Where a verb has ``--root`` and the like, it takes ``tracking.root=FOLDER`` as well, which all verbs do.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like any parser, after translating such arguments."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._as_option(word) for word in words], namespace)

    def _as_option(self, word: str) -> str:
        key = STORE_KEY.match(word)
        if key is None or f"--{key[1]}" not in self._option_string_actions:
            return word
        value = word[key.end() :].strip("'\"")  # in quotes, as a value of Hydra's may be
        return f"--{key[1]}={value}"

    def add_root(self) -> None:
        """Add ``--root``, the folder of the runs."""
        usual = TrackingSettings().root
        self.add_argument("--root", type=as_path, default=usual, help=f"folder of the runs; default: {usual}")

    def add_trials(self) -> None:
        """Add ``--trial``, for all finished trials or those that are named."""
        words = "a trial; may be repeated; default: all finished"
        self.add_argument("--trial", type=int, action="append", metavar="N", help=words)

    def add_sampling(self, longest: int) -> None:
        """Add how texts are sampled, and the default of their length."""
        words = f"longest text, in tokens; default: {longest}"
        self.add_argument("--max-new-tokens", type=int, default=longest, metavar="N", help=words)
        words = "0, the default, takes the likeliest token"
        self.add_argument("--temperature", type=float, default=0.0, help=words)
        words = "sample from the likeliest tokens with this total probability"
        self.add_argument("--top-p", type=float, default=1.0, help=words)
        self.add_argument("--seed", type=int, default=0, help="seed of sampling; default: 0")

    def error(self, message: str) -> NoReturn:
        """Raise it, with the usage as the rule."""
        words = message.partition(":")[2].split() if message.startswith("unrecognized") else []
        meant = "".join(did_you_mean(word, self._option_string_actions) for word in words[:1])
        raise ConfigError(message, self.format_usage().strip(), f"{meant}`{self.prog} --help` explains them.")


def check_least(known: argparse.Namespace, **least: int) -> None:
    """Check options that are numbers, where they are given.

    Raises:
        ConfigError: one is less than its least value.
    """
    for name, lowest in least.items():
        value = getattr(known, name)
        if value is not None and not value >= lowest:  # NaN is not
            raise ConfigError(f"--{name.replace('_', '-')} {value}", f"It must be at least {lowest}.")

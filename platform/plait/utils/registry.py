"""Registries of named choices, to which other packages can add: each is registered once, in the module that
defines it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Generic, TypeVar

from plait.core.errors import FULL_ERROR, ConfigError, PlaitError, choices
from plait.utils.spelling import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Choices of one kind, by name.

    Args:
        kind: what an entry is called in errors, as in "stopping rule".
        key: the config key that names one, as in "search.stopping.kind".
        modules: modules that register their entries when they are imported; imported at the first lookup.
        group: entry-point group of further such modules, from other packages.
        elsewhere: names used by other libraries, and the entries that they mean.
    """

    def __init__(
        self,
        kind: str,
        *,
        key: str,
        modules: tuple[str, ...] = (),
        group: str = "",
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self.key = key
        self._modules = modules
        self._group = group
        self._elsewhere = elsewhere
        self._entries: dict[str, T] = {}
        self._owners: dict[str, str] = {}  # the module that registers each
        self._loaded = False

    def add(self, name: str, entry: T, module: str = "") -> T:
        """Register an entry. Its own module may replace it, since a module can be loaded again.

        Args:
            module: whose entry it is, where a helper registers it.

        Raises:
            ConfigError: another module has an entry with this name.
        """
        return self._add(name, entry, module or _caller())

    def register(self, name: str) -> Callable[[T], T]:
        """The decorator form of :meth:`add`."""
        module = _caller()
        return lambda entry: self._add(name, entry, module)

    def _add(self, name: str, entry: T, module: str) -> T:
        self.add_later(name, module)
        self._entries[name] = entry
        return entry

    def add_later(self, name: str, module: str) -> None:
        """Register an entry that this module adds: it is imported when the entry is first asked for.

        Raises:
            ConfigError: another module has an entry with this name.
        """
        if (owner := self._owners.setdefault(name, module)) != module:
            raise ConfigError(
                f"{self.kind} {name!r} of {module}",
                f"{owner} has a {self.kind} with this name.",
                "Rename one of them, or uninstall the package that has it.",
            )

    def remove(self, name: str) -> None:
        """Remove an entry, as tests do."""
        self._entries.pop(name, None)
        self._owners.pop(name, None)

    def get(self, name: str) -> T:
        """The entry with this name.

        Raises:
            ConfigError: there is none; the message lists all names.
        """
        self._load()
        if name not in self._entries and name in self._owners:
            importlib.import_module(self._owners[name])
        if name not in self._entries:
            meant = self._elsewhere.get(name.lower().replace("_", ""))
            near = f"Did you mean {meant}? " if meant else did_you_mean(name, self.names())
            raise ConfigError(
                f"{self.key}={name}",
                f"Unknown {self.kind} {name!r}.",
                f"{near}Available: {choices(self.names())}.",
            )
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        self._load()
        return tuple(sorted(self._owners))

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True  # before the imports: a module that registers may look up
        try:
            for module in self._modules:
                importlib.import_module(module)
            if self._group:
                for point in sorted(entry_points(group=self._group), key=lambda item: item.name):
                    _load_from_package(point)
        except BaseException:
            self._loaded = False
            raise


def _load_from_package(point: EntryPoint) -> None:
    """Import what a package adds.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        point.load()
    except PlaitError:
        raise
    except Exception as error:  # whatever the package's own code raises
        raise ConfigError(
            f"{point.value}: {type(error).__name__}: {error}",
            f"An installed package adds this module to Plait (entry point {point.name!r} of {point.group}).",
            f"Correct it, or uninstall the package; {FULL_ERROR}=1 shows where the error is.",
        ) from error


def _caller() -> str:
    """The module that calls the registry: an entry does not say whose it is, as its class may come from
    anywhere."""
    return str(sys._getframe(2).f_globals.get("__name__", "__main__"))  # none in code run by exec

"""Adapters in PEFT folders, by name; they come and go while the engine runs.

A seam: the engine does not know where adapters are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import numpy as np
import torch

from plait.adapters.facts import CONFIG, WEIGHTS, quantised_base
from plait.adapters.peft_folder import LocatedAdapter, locate_adapter, read_adapter, unreadable
from plait.adapters.tensor_file import expect_file, read_parts
from plait.core.errors import InputError, ModelError, StorageError
from plait.core.settings import WHOLE
from plait.models.base import BaseModel
from plait.serve.cells import Adapter, AdapterKey, Parts, Weights
from plait.utils.progress import say
from plait_kernels.pooled import PLACED

HOST_BYTES = 1 << 30  # of adapters that are kept in memory beside a GPU's pool
Sizes = Mapping[str, tuple[int, int]]
Stamp = tuple[tuple[int, int, int], ...]  # of each file: its number, bytes, and when it changed


class NoAdapterError(InputError):
    """No adapter has the name, or no longer."""


@dataclass(frozen=True, slots=True)
class FolderAdapter:
    """An adapter of a folder, as it was when it was added."""

    name: str
    folder: Path
    number: int
    rank: int
    scale: float
    sites: frozenset[str]
    sizes: Sizes
    stamp: Stamp
    located: LocatedAdapter | None
    pooled: bool = True

    @property
    def key(self) -> AdapterKey:
        """Its name, and when it was added: a name may be used again."""
        return self.name, self.number

    def weights(self) -> Weights:
        """Read the folder.

        Raises:
            StorageError, ModelError: it is not what it was.
        """
        stored = read_adapter(self.folder, self.sizes)
        self._check_unchanged()
        return stored.weights

    def expect(self) -> None:
        """Have the system read the file."""
        expect_file(self.folder / WEIGHTS)

    def parts(self) -> Parts | None:
        """Read the file part by part; None if it must be read as a whole.

        Reading raises StorageError if the file cannot be read, InputError if it is not what it was.
        """
        located = self.located
        if located is None or located.dtype not in PLACED:
            return None
        tensors = np.stack((located.numbers, located.bounds[:, 0]), axis=1)
        return Parts(torch.from_numpy(tensors), located.dtype, self._read(located))

    def _read(self, located: LocatedAdapter) -> Iterator[tuple[slice, int]]:
        try:
            yield from read_parts(self.folder / WEIGHTS, located.bounds)
        except (OSError, ValueError) as error:
            self._check_unchanged()  # which says more
            raise unreadable(self.folder, error) from error
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if _stamp(self.folder) != self.stamp:  # keys and values in the pool are those of the old weights
            raise InputError(
                f"{self.folder} has changed",
                "An adapter's files must not change after it was added.",
                "Remove the adapter, and add it again.",
            )


def _stamp(folder: Path) -> Stamp:
    """What changes when one of its files does.

    Raises:
        StorageError: there is no such file.
    """
    try:
        files = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror}", f"An adapter's folder has {CONFIG} and {WEIGHTS}."
        ) from error
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in files)


class FolderAdapters:
    """Adapters that requests may name; only their sizes are kept.

    Args:
        most: adapters that there may be; None: any number.
    """

    bank = None

    def __init__(
        self,
        base: BaseModel,
        folders: Mapping[str, Path] = MappingProxyType({}),
        *,
        most: int | None = None,
    ) -> None:
        self._most = most
        self._sizes = {site.name: (site.in_features, site.out_features) for site in base.sites}
        self._quantise = base.identity.quantise
        self._said_unknown = False
        self._adapters: dict[str, FolderAdapter] = {}
        self._added = 0
        self._lock = Lock()  # the server adds and removes, the engine's thread finds
        for name, folder in folders.items():
            self.add(name, folder)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order of addition."""
        with self._lock:
            return tuple(self._adapters)

    def __contains__(self, name: str) -> bool:
        """Whether there is an adapter with this name."""
        with self._lock:
            return name in self._adapters

    def add(self, name: str, folder: Path) -> None:
        """Add an adapter.

        Raises:
            InputError: the name is taken, there are as many as there may be, or files changed meanwhile.
            StorageError, ModelError: the folder has none for this base model.
        """
        stamp = _stamp(folder)
        stored = read_adapter(folder, self._sizes, values=False)
        located = locate_adapter(folder, tuple(self._sizes))
        self._check_base(folder, quantised_base(folder))
        if _stamp(folder) != stamp:  # what was checked and what was located may be of two files
            raise InputError(
                f"{folder} has changed",
                "An adapter's files must not change while it is added.",
                "Add it again.",
            )
        with self._lock:
            if name in self._adapters:
                raise InputError(
                    f"adapter {name!r}", "There is already an adapter with this name.", "Remove it first."
                )
            if self._most is not None and len(self._adapters) >= self._most:
                raise InputError(
                    f"adapter {name!r}",
                    f"There are already {self._most} adapters, the maximum.",
                    "Remove one first, or start the server with more: --max-adapters.",
                )
            self._added += 1
            self._adapters[name] = FolderAdapter(
                name,
                folder,
                self._added,
                stored.rank,
                stored.scale,
                frozenset(stored.weights),
                self._sizes,
                stamp,
                located,
            )

    def _check_base(self, folder: Path, trained: str | None) -> None:
        """Refuse an adapter that was trained on another form of the base model's weights; where its file does
        not say on which, that is said, once."""
        if trained not in (None, self._quantise):
            raise ModelError(
                f"{folder}: trained with model.quantise={trained}",
                f"The base model here has model.quantise={self._quantise}, so its outputs differ.",
                "Serve the adapter separately.",
            )
        if trained is None and self._quantise != WHOLE and not self._said_unknown:
            self._said_unknown = True
            say(
                f"{folder} does not say on which weights it was trained. Here the base model has "
                f"model.quantise={self._quantise}: if it was trained on others, answers are not its own. "
                "(Said of the first such folder.)"
            )

    def remove(self, name: str) -> None:
        """Remove an adapter; requests that have it end as they would.

        Raises:
            NoAdapterError: there is none with this name.
        """
        with self._lock:
            if self._adapters.pop(name, None) is None:
                raise _unknown(name)

    def find(self, name: str) -> Adapter:
        """The adapter with this name."""
        with self._lock:
            if name not in self._adapters:
                raise _unknown(name)
            return self._adapters[name]

    def knows(self, key: AdapterKey) -> bool:
        """Whether the adapter with this key is there now."""
        with self._lock:
            found = self._adapters.get(key[0])
        return found is not None and found.key == key

    def lasting(self) -> Sequence[Adapter]:
        """The one that needs most room, so that a request that fits without an adapter fits with one."""
        with self._lock:
            sizes = {name: each.rank * len(each.sites) for name, each in self._adapters.items()}
            return [self._adapters[max(sizes, key=lambda name: sizes[name])]] if sizes else []


def _unknown(name: str) -> NoAdapterError:
    return NoAdapterError(f"adapter {name!r}", "There is no adapter with this name.")

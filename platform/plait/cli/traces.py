"""Takes Hydra's folder of a run away again where bad input ended the run before it did anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from plait.cli.compose import hydra_config
from plait.core.errors import InputError

# Folders that the present run makes: its own and those above that were not there, innermost first.
_made: list[Path] = []


class NoteFolder(Callback):
    """Hydra calls it before it makes a folder (``hydra.callbacks`` in conf/config.yaml)."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Note the folder of a single job."""
        with hydra_config(config):
            _note(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Note the folder of a whole search."""
        with hydra_config(config):
            _note(Path(config.hydra.sweep.dir))


@contextmanager
def without_traces() -> Iterator[None]:
    """Inside, one run: an InputError that comes before :func:`keep` leaves no folder behind."""
    _made.clear()
    try:
        yield
    except InputError:
        _remove()
        raise
    finally:
        _made.clear()


def keep() -> None:
    """From now on the run's folder stays, whatever comes."""
    _made.clear()


def _note(folder: Path) -> None:
    folder = folder.absolute()
    _made[:] = [path for path in (folder, *folder.parents) if not path.exists()]


def _remove() -> None:
    """Remove what Hydra wrote when the run began, then the folders, as far as nothing else is in them."""
    if not _made:
        return
    own, *above = _made
    there = sorted(own.rglob("*"), reverse=True)  # what is in a folder comes before it
    if not all(path.is_dir() or _written_at_the_start(path) for path in there):
        return
    with suppress(OSError):  # a folder above that is not empty has become another run's too
        for path in (*there, own, *above):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def _written_at_the_start(path: Path) -> bool:
    if path.suffix == ".log":
        return path.stat().st_size == 0
    return path.name == "multirun.yaml" or (path.parent.name == ".hydra" and path.suffix == ".yaml")

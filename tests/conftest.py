"""What must be set before any test module is imported, and servers that several folders of tests use."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from postgresql import PostgresqlServer

# Python goes through all objects a tenth as often: some 900,000 of libraries and tests stay until the end.
gc.set_threshold(*gc.get_threshold()[:2], 100)


def memory_folder() -> str | None:
    """A disk in memory that has room and from which programs may be loaded; None where there is none."""
    folder = Path("/dev/shm")
    if not folder.is_mount() or shutil.disk_usage(folder).free < 4 * 2**30:
        return None
    return None if os.statvfs(folder).f_flag & os.ST_NOEXEC else str(folder)


# Pytest's folders: the tests' many stores wait for the disk at every commit, on a real one for milliseconds.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory_folder() or tempfile.gettempdir())


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only starts such workers imports nothing for it.

    Of a whole run's workers, one process imports what tests fork, and not one for each.
    """
    if getattr(config.option, "numprocesses", None) and not config.option.collectonly:
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            from forked import share_forking

            share_forking()
    else:
        prepare()


def prepare() -> None:
    """Set what must be set before a test module is imported."""
    import hypothesis
    import without_gpu  # noqa: F401
    from hypothesis.internal.conjecture import providers
    from parsed_once import parse_once

    parse_once()
    # What a machine under load takes for an example says nothing about Plait. What lands must not depend on
    # luck: the examples are the same each time, unless PLAIT_EXPLORE=1 asks for others.
    hypothesis.settings.register_profile("plait", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
    explores = bool(os.environ.get("PLAIT_EXPLORE"))
    hypothesis.settings.load_profile("explore" if explores else "plait")
    if not explores:  # nor depend on which modules were imported: it reads numbers in all, for seconds
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_finish() -> None:
    """Let Python look no more at the objects of libraries and collected tests, which stay."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python end as usual: Triton's bindings report what was never collected."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def _postgresql_server() -> Iterator[PostgresqlServer]:
    """A throw-away PostgreSQL server for all tests that do not stop it."""
    from postgresql import postgresql_server

    with postgresql_server() as server:
        yield server


@pytest.fixture(scope="session")
def new_database(_postgresql_server: PostgresqlServer) -> Callable[[], str]:
    """Makes an empty PostgreSQL database and gives its URL, as a user would write it."""
    return _postgresql_server.new_database


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with MLflow's tables and nothing in them: making them takes seconds."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").get_experiment_by_name("none")
    return file


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Callable[[], Path]:
    """Makes a folder with a copy of that file."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("store")
        shutil.copy(empty_store, folder)
        return folder

    return make


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders that the code makes for itself in this process lie with those of the tests, in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        yield


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """Put the root logger's handlers back: Hydra, called in this process, makes ones on a captured stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Put the number of torch's threads back: more than cores that are free wait for each other, in all tests
    that follow."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)

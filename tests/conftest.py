"""What must be set before any test module is imported, and servers that several folders of tests use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch
from postgresql import PostgresqlServer, postgresql_server

# Triton decides at its own import whether its kernels are interpreted, and other libraries import it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# What a machine under load takes for an example says nothing about Plait.
hypothesis.settings.register_profile("plait", deadline=None)
hypothesis.settings.load_profile("plait")


@pytest.fixture(scope="session")
def _postgresql_server() -> Iterator[PostgresqlServer]:
    """A throw-away PostgreSQL server for all tests that do not stop it."""
    with postgresql_server() as server:
        yield server


@pytest.fixture(scope="session")
def new_database(_postgresql_server: PostgresqlServer) -> Callable[[], str]:
    """Makes an empty PostgreSQL database and gives its URL, as a user would write it."""
    return _postgresql_server.new_database


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """Put the root logger's handlers back: Hydra, called in this process, makes ones on a captured stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

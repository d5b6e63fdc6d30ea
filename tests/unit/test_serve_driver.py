"""A driver whose engine has died, or that stops: nobody waits, each is told why, and the server ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch

from plait.core.errors import PlaitError
from plait.serve.driver import DIED, STOPPING, BusyError, Driver
from plait.serve.requests import Request, Update
from plait.serve.server import Endpoint, Limits, Models, make_app, run


class Engine:
    """An engine that runs no model.

    Args:
        error: what one of its methods raises.
        dies: the method.
    """

    def __init__(self, error: BaseException | None = None, dies: str = "step") -> None:
        self.scheduler = SimpleNamespace(waiting=0)
        self.running = ()
        self._error = error
        self._dies = dies

    def add(self, _: Request) -> int:
        self._may_die("add")
        return 0

    def step(self) -> list[Update]:
        self._may_die("step")
        return []

    def cancel(self, number: int) -> None:
        """As the engine's own."""

    def _may_die(self, method: str) -> None:
        if self._error is not None and method == self._dies:
            raise self._error


def asked(driver: Driver) -> None:
    async def ask() -> None:
        await asyncio.wait_for(anext(driver.stream(Request((1,)))), 60)

    asyncio.run(ask())


FATAL: list[Any] = [
    (SystemExit("as memory has run out"), "step"),
    (SystemExit("as memory has run out"), "add"),
    (torch.AcceleratorError("CUDA error: an illegal memory access"), "step"),
]


@pytest.mark.parametrize(("error", "dies"), FATAL)
def test_nobody_waits_for_a_thread_that_has_died(error: BaseException, dies: str) -> None:
    driver = Driver(Engine(error, dies), most_waiting=9)  # type: ignore[arg-type]
    died = threading.Event()
    driver.watch(died.set)
    assert driver.ends == ""
    for _ in range(2):
        with pytest.raises(BusyError, match=DIED):
            asked(driver)
    assert died.wait(60)
    assert (driver.error, driver.ends) == (error, DIED)
    driver.watch(died.clear)
    assert not died.is_set(), "also one who comes late is told"


def test_an_error_of_one_iteration_ends_its_requests_alone() -> None:
    driver = Driver(Engine(RuntimeError("no memory")), most_waiting=9)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            asked(driver)
    assert (driver.error, driver.ends) == (None, "")
    driver.stop()
    with pytest.raises(BusyError, match=STOPPING):
        asked(driver)


def test_a_full_queue_and_one_that_is_too_slow_say_so() -> None:
    engine = Engine()
    driver = Driver(engine, most_waiting=3, most_seconds=5)  # type: ignore[arg-type]
    engine.scheduler.waiting = 2
    driver._pace.note(40, 4)
    with pytest.raises(BusyError, match="more than 5 s") as late:
        asked(driver)
    assert late.value.seconds == 25
    engine.scheduler.waiting = 3
    with pytest.raises(BusyError, match="3 requests wait already"):
        asked(driver)
    driver.stop()


def test_a_server_whose_engine_has_died_says_so_and_ends_with_the_error() -> None:
    """A supervisor starts it again; one that lived on would refuse all requests for ever."""
    driver = Driver(Engine(SystemExit("as memory has run out")), most_waiting=9)  # type: ignore[arg-type]
    base: Any = SimpleNamespace(tokeniser=lambda _: {"input_ids": [1]})
    limits = Limits()
    endpoint = Endpoint(driver, base, Models({"base": None}), limits)
    app = make_app(endpoint, driver, key=None, limits=limits, local=True)
    address = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{address.getsockname()[1]}"
    found: list[tuple[int, str]] = []

    def ask() -> None:
        found.append((requests.get(f"{url}/health", timeout=60).status_code, ""))
        answer = requests.post(f"{url}/v1/completions", json={"model": "base", "prompt": "a"}, timeout=60)
        found.append((answer.status_code, answer.json()["error"]["message"]))

    client = threading.Thread(target=ask)
    client.start()
    with pytest.raises(PlaitError, match="the engine: SystemExit: as memory has run out"):
        run(app, address, driver)
    client.join(60)
    assert found == [(200, ""), (503, DIED)]
    health = asyncio.run(endpoint.health())
    assert (health.status_code, DIED in bytes(health.body).decode()) == (503, True)

"""A driver whose engine has died, or that stops: nobody waits, each is told why, and the server ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from starlette.exceptions import HTTPException

from plait.core.errors import InputError, PlaitError
from plait.serve.bodies import TextBody
from plait.serve.driver import DIED, STOPPING, BusyError, Driver
from plait.serve.requests import Request, Update
from plait.serve.server import Endpoint, Models, make_app, run


class NoAdapters:
    """Of a server with fixed names alone."""

    names = ()

    def __contains__(self, name: str) -> bool:
        return False


NONE: Any = NoAdapters()


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


def asked(driver: Driver, answers: int = 1) -> None:
    async def ask() -> None:
        await asyncio.wait_for(anext(driver.stream(*[Request((1,))] * answers)), 60)

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


def test_a_request_whose_client_has_left_is_cancelled_after_the_iteration_that_runs() -> None:
    begun, permits, cancelled = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    calls: list[str] = []

    class Gated(Engine):
        def step(self) -> list[Update]:
            begun.release()
            permits.acquire(timeout=60)
            calls.append("step")
            return [Update(0, "a")]

        def cancel(self, _: int) -> None:
            calls.append("cancel")
            cancelled.set()

    driver = Driver(Gated(), most_waiting=9)  # type: ignore[arg-type]

    async def ask_and_leave() -> None:
        updates = driver.stream(Request((1,)))
        permits.release()
        await anext(updates)
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60), "the second iteration has begun"
        await updates.aclose()

    asyncio.run(ask_and_leave())
    permits.release(9)
    assert cancelled.wait(10)
    driver.stop()
    assert calls[:3] == ["step", "step", "cancel"]


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


def test_each_answer_that_one_client_asks_for_has_its_place_in_the_queue() -> None:
    engine = Engine()
    driver = Driver(engine, most_waiting=4, most_seconds=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"5 answers\n.* 4 answers may wait.\n.*--queue"):
        asked(driver, 5)
    assert driver.counts.ended == {}, "it is wrong, not refused"
    engine.scheduler.waiting = 1
    with pytest.raises(BusyError, match="1 requests wait already; with 4 more"):
        asked(driver, 4)
    driver._pace.note(8, 4)
    with pytest.raises(BusyError, match="more than 5 s") as late:
        asked(driver, 3)  # the last of which has three ahead of it
    assert late.value.seconds == 3
    driver.stop()


def test_too_many_prompts_are_refused_before_they_are_read() -> None:
    def unread(_: str) -> None:
        raise AssertionError("a prompt was read")

    driver = Driver(Engine(), most_waiting=999)  # type: ignore[arg-type]
    base: Any = SimpleNamespace(tokeniser=unread)
    endpoint = Endpoint(driver, base, Models({"base": None}, NONE), 9)
    body = TextBody(model="base", prompt=["a"] * 65, n=2)
    with pytest.raises(HTTPException, match="130 answers: one request may ask for at most 128"):
        asyncio.run(endpoint.text(body, None))  # type: ignore[arg-type]
    driver.stop()


def test_few_of_a_bodys_unknown_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr("plait.serve.bodies.did_you_mean", lambda name, *_, **__: looked.append(name))
    TextBody.model_validate({"model": "base", "prompt": "a"} | {f"unknown-{each}": 1 for each in range(999)})
    assert len(looked) == 5


def test_a_likely_name_is_looked_for_among_few_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for on the thread that all streams share."""
    compared: list[int] = []

    def count(_: str, names: Sequence[str]) -> str:
        compared.append(len(names))
        return "Did you mean another? "

    monkeypatch.setattr("plait.serve.server.did_you_mean", count)
    for number, meant in ((100, " Did you mean another?"), (2000, "")):
        models = Models({f"customer-{each:05d}": None for each in range(number)}, NONE)
        with pytest.raises(HTTPException) as refused:
            models.adapter("customer-000x1")
        assert str(refused.value.detail).endswith(f"/v1/models lists them.{meant}")
    with pytest.raises(HTTPException):
        Models({f"{each:0128d}": None for each in range(100)}, NONE).adapter("a" * 9999)
    assert compared == [100], "a hundred long names are too many, too"


def test_a_server_whose_engine_has_died_says_so_and_ends_with_the_error() -> None:
    """A supervisor starts it again; one that lived on would refuse all requests for ever."""
    driver = Driver(Engine(SystemExit("as memory has run out")), most_waiting=9)  # type: ignore[arg-type]
    base: Any = SimpleNamespace(tokeniser=lambda _: {"input_ids": [1]})
    endpoint = Endpoint(driver, base, Models({"base": None}, NONE), 9)
    app = make_app(endpoint, driver, key=None, local=True)
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

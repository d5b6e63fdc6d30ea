"""Many clients at a real server process for a while: no error, no growth of memory, all pages free after it.
A server that is killed in the middle of streams serves again once it is restarted. What it refuses, the
openai client names.

``PLAIT_SOAK_SECONDS=300`` and ``PLAIT_SOAK_CLIENTS=200`` ask for so long and by so many; without them a few
clients ask for a few seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import openai
import psutil
import pytest
import requests
import torch
from forked import Forked
from mlflow_server import free_port

from plait.adapters.peft_folder import export_adapter
from plait.core.jobs import AdapterSpec
from plait.models.load import inspect_model, named_model
from plait.models.targets import resolve_targets

SECONDS = float(os.environ.get("PLAIT_SOAK_SECONDS", "4"))
CLIENTS = int(os.environ.get("PLAIT_SOAK_CLIENTS", "24"))
KEY = "a secret"
RANKS = {"one": 1, "two": 16, "three": 33}
COMES = "three"  # added and removed while the server runs
LEAKED_KIB = 1.0  # of memory a request: the engine alone holds 1.7 of one that waits
TELLING = 5000  # requests of a half, beside whose KiB the allocator's MiB to and fro are little
LEAVES = 0.1  # share of clients that leave before the answer's end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of the tiny model, in folders."""
    made = tmp_path_factory.mktemp("soak")
    linears = inspect_model(named_model("tiny-llama"), cache=made).linears
    sizes = {linear.name: (linear.in_features, linear.out_features) for linear in linears}
    for name, rank in RANKS.items():
        noise = torch.Generator().manual_seed(rank)
        spec = AdapterSpec(rank, target_modules="all-linear")
        weights = {
            site: (
                torch.randn(rank, sizes[site][0], generator=noise) * 0.05,
                torch.randn(sizes[site][1], rank, generator=noise) * 0.05,
            )
            for site in resolve_targets(spec.target_modules, linears)
        }
        export_adapter(made / "adapters" / name, spec, weights, base="tiny-llama", linears=linears)
    return made


class Server:
    """`plait serve` in a process of its own, on a port that a restart takes again."""

    def __init__(self, folder: Path, *more: str) -> None:
        self._folder = folder
        self.port = free_port()
        self._words = ["serve", "--adapters", "adapters", "--port", str(self.port), *more]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        environment = {"PLAIT_SERVE_KEY": KEY, "PLAIT_CACHE": str(self._folder / "cache")}
        self.process = Forked(self._words, self._folder, environment=environment)
        self.process.until(f"127.0.0.1:{self.port}")

    def memory(self) -> float:
        """MiB that it has of its own."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    @contextmanager
    def sampled(self) -> Iterator[list[tuple[float, float]]]:
        """Times and its memory, every half second."""
        samples: list[tuple[float, float]] = []
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.5):
                samples.append((time.monotonic(), self.memory()))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield samples
        finally:
            ended.set()
            sampler.join()

    def measured(self) -> dict[str, float]:
        """Its metrics, without comments."""
        found = requests.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        lines = [line for line in found.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def drained(self) -> dict[str, float]:
        """Its metrics once no request is left."""
        for _ in range(600):
            found = self.measured()
            if not found["plait_requests_running"] + found["plait_requests_waiting"]:
                break
            time.sleep(0.1)
        return found


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder, "--queue", str(2 * CLIENTS), "--max-new-tokens", "64", "--pool-tokens", "8192")
    yield made
    made.process.kill()


@dataclass
class Crowd:
    """Clients that ask until a time, one request after another."""

    server: Server
    until: float
    ended: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """All of them, while an adapter comes and goes."""
        async with openai.AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key=KEY, max_retries=0, timeout=120
        ) as client:
            asking = [self._client(client, random.Random(number)) for number in range(CLIENTS)]
            await asyncio.gather(*asking, self._change(client))

    async def _change(self, client: openai.AsyncOpenAI) -> None:
        body = {"lora_name": COMES, "lora_path": COMES}
        while time.monotonic() < self.until:
            for verb in ("unload", "load"):  # both, so that it is there at the end, too
                try:
                    await client.post(f"/{verb}_lora_adapter", cast_to=str, body=body)
                except openai.OpenAIError as error:
                    self.errors.append(f"{verb}: {error}")
                self.ended[verb] += 1
                await asyncio.sleep(0.25)

    async def _client(self, client: openai.AsyncOpenAI, draw: random.Random) -> None:
        while time.monotonic() < self.until:
            model = draw.choice(("base", *RANKS))
            try:
                self.ended[await self._ask(client, model, draw)] += 1
            except openai.NotFoundError:
                self.ended["not there"] += model == COMES
                self.errors += [] if model == COMES else [f"{model} is not found"]
            except openai.OpenAIError as error:
                gone = model == COMES and "no adapter with this name" in str(error)  # removed meanwhile
                self.ended["not there"] += gone
                self.errors += [] if gone else [f"{type(error).__name__}: {error}"]

    async def _ask(self, client: openai.AsyncOpenAI, model: str, draw: random.Random) -> str:
        prompt = draw.choice(("A shared beginning of a prompt. ", "")) + "a" * draw.randrange(1, 60)
        count, seed = draw.randrange(1, 40), draw.randrange(2**32)
        if draw.random() < 0.3:
            chat = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": prompt}], max_tokens=count, seed=seed
            )
            assert chat.usage is not None
            return "chat"
        if draw.random() < 0.5:
            whole = await client.completions.create(
                model=model, prompt=prompt, max_tokens=count, temperature=0, stop="zz"
            )
            assert whole.choices[0].finish_reason in ("stop", "length")
            return "whole"
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=count, seed=seed, stream=True
        )
        leaves = draw.random() < LEAVES
        async with aclosing(stream.__aiter__()) as pieces:
            reasons = []
            async for piece in pieces:
                reasons.append(piece.choices[0].finish_reason)
                if leaves:
                    await stream.close()
                    return "left"
        assert reasons[-1] in ("stop", "length")
        return "streamed"


@pytest.mark.timeout(2 * SECONDS + 300)  # a loaded machine drains slowly
def test_many_clients_for_a_while_leave_no_error_and_no_memory_behind(server: Server) -> None:
    warm = Crowd(server, time.monotonic() + max(2.0, SECONDS / 10))
    asyncio.run(warm.run())
    server.drained()
    adapters = server.measured()["plait_adapter_host_bytes"]
    crowd = Crowd(server, time.monotonic() + SECONDS)
    with server.sampled() as samples:
        asyncio.run(crowd.run())
    after = server.drained()
    quarters = [median(memory for _, memory in each) for each in _quarters(samples)]
    requests = sum(crowd.ended[kind] for kind in ("chat", "whole", "streamed", "left"))
    counts = {name: value for name, value in after.items() if "requests_total" in name}
    print(f"{requests} requests of {CLIENTS} clients in {SECONDS:.0f} s: {dict(crowd.ended)}")
    shown = ", ".join(f"{each:.1f}" for each in quarters)
    print(f"memory of the four quarters, medians in MiB: {shown}; {counts}")
    assert not warm.errors + crowd.errors
    assert min(crowd.ended[kind] for kind in ("chat", "whole", "streamed", "load", "unload")) > 0
    assert after["plait_pool_pages_unused"] == after["plait_pool_pages"]
    assert (
        after.get('plait_requests_total{how="failed"}', 0.0)
        <= crowd.ended["not there"] + warm.ended["not there"]
    )
    assert after["plait_adapter_host_bytes"] <= adapters, "removed adapters are kept"
    if requests / 2 >= TELLING:  # from the third quarter's middle to the last one's a quarter of them came
        assert quarters[3] - quarters[2] < LEAKED_KIB / 1024 * requests / 4


def _quarters(samples: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    size = len(samples) // 4
    return [samples[number * size : (number + 1) * size] for number in range(4)]


async def _cut_streams(server: Server, count: int) -> list[str]:
    """How streams end whose server is killed once each has had a piece."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
    begun = [asyncio.Event() for _ in range(count)]
    killed = asyncio.Event()

    async def ask(number: int) -> str:
        try:
            async for _ in await client.completions.create(**ASKED, max_tokens=1000, stream=True):
                begun[number].set()
                await killed.wait()
        except Exception as error:  # of the client's own, or of what it is built on
            return type(error).__name__
        return "ended"

    asking = [asyncio.ensure_future(ask(number)) for number in range(count)]
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 120)
    server.process.signal(signal.SIGKILL)
    assert server.process.end() == -signal.SIGKILL
    killed.set()
    return await asyncio.wait_for(asyncio.gather(*asking), 120)


ASKED: Any = {"model": "two", "prompt": "a", "temperature": 0}


def test_a_server_killed_in_the_middle_of_streams_serves_again(folder: Path) -> None:
    server = Server(folder)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120)
        before = client.completions.create(**ASKED, max_tokens=20).choices[0].text
        ended = asyncio.run(_cut_streams(server, 8))
        assert "ended" not in ended, "none had its last token"
        server.start()
        assert client.completions.create(**ASKED, max_tokens=20).choices[0].text == before
        pieces = client.completions.create(**ASKED, max_tokens=20, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == before
        found = server.drained()
        assert found["plait_pool_pages_unused"] == found["plait_pool_pages"]
        assert (
            found['plait_requests_total{how="length"}'] + found.get('plait_requests_total{how="stop"}', 0)
            == 2
        )
    finally:
        server.process.kill()


async def _at_once(server: Server, count: int) -> list[int]:
    """The statuses of so many long requests at once."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    async def ask() -> int:
        try:
            await client.completions.create(**ASKED, max_tokens=700)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    return await asyncio.gather(*(ask() for _ in range(count)))


def test_a_server_process_refuses_and_streams_as_the_openai_client_expects(folder: Path) -> None:
    server = Server(folder, "--queue", "1", "--pool-tokens", "1000")  # room for one of the long requests
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
        ask = client.completions.create
        refusals: dict[int, Any] = {
            401: lambda: client.with_options(api_key="another").models.list(),
            404: lambda: ask(**ASKED | {"model": "nobody"}),
            413: lambda: ask(**ASKED | {"prompt": "a" * (1 << 20)}),
            422: lambda: ask(**ASKED | {"max_tokens": 0}),
        }
        for status, refused in refusals.items():
            with pytest.raises(openai.APIStatusError) as said:
                refused()
            assert said.value.status_code == status
        found = Counter(asyncio.run(_at_once(server, 6)))
        assert found.keys() == {200, 503}, "one may wait"
        chat: Any = {"model": "two", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
        whole = client.chat.completions.create(**chat, max_tokens=20).choices[0].message.content
        pieces = client.chat.completions.create(**chat, max_tokens=20, stream=True)
        assert whole
        assert "".join(piece.choices[0].delta.content for piece in pieces) == whole
    finally:
        server.process.kill()

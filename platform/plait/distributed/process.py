"""One process of a run: it holds a replica of the base model and does what the coordinator sends.

Started as ``python -m plait.distributed.process`` with its address in the environment.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from plait.core.errors import PlaitError
from plait.core.jobs import DataSpec
from plait.core.messages import Attach, Command
from plait.core.samples import TokenisedData
from plait.distributed.channel import (
    Address,
    Answer,
    Beat,
    Build,
    Channel,
    Hello,
    Join,
    Load,
    Measure,
    Provide,
    Refusal,
    Share,
    connect,
)
from plait.distributed.exchange import Exchange
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import choose_device, product_rate
from plait.engine.local_worker import LocalWorker
from plait.engine.span_recorder import SpanRecorder
from plait.models.load import load_model
from plait.utils.paths import cache_dir

ADDRESS, KEY, NUMBER = "PLAIT_COORDINATOR", "PLAIT_KEY", "PLAIT_PROCESS"  # variables of the environment
BEATS = 1.0  # seconds between two signs of life

Request = Load | Join | Build | Measure | Provide | Share | Command


class Replica:
    """The base model of this process, its worker and its link to the other processes."""

    def __init__(self, number: int, request: Load, recorder: SpanRecorder) -> None:
        self.number = number
        self._recorder = recorder
        self._device = choose_device(request.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", number % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._model = load_model(request.model, cache=cache_dir(), device=self._device)
        self._data: dict[DataSpec, TokenisedData] = {}
        self._made_exchange: Exchange | None = None
        self._worker: LocalWorker | None = None

    @property
    def _exchange(self) -> Exchange:
        assert self._made_exchange is not None
        return self._made_exchange

    @property
    def worker(self) -> LocalWorker:
        """The engine's worker, once it is built."""
        assert self._worker is not None
        return self._worker

    def answer(self, request: Request) -> Answer:
        """Carry out a request.

        Raises:
            PlaitError: as the worker's ``execute``.
        """
        started = time.perf_counter()
        match request:
            case Join(store, count, seconds):
                self._made_exchange = Exchange(store, self.number, count, self._device, seconds)
                return Answer()
            case Build(engine):
                data = DataCatalogue(self._data.__getitem__)
                exchange, recorder = self._exchange, self._recorder
                self._worker = LocalWorker(self._model, data, engine, recorder=recorder, peers=exchange)
                return Answer(facts=self.worker.facts)
            case Measure():
                return Answer(rate=product_rate(self._device, self._model.dtype))
            case Provide(spec, data):
                self._data[spec] = data
                return Answer()
            case Share(job, best):
                before = self._exchange.received
                for tensor in self.worker.adapters.whole(job, best=best):
                    self._exchange.share(tensor)
                self.worker.bank.refresh([job])
                self._recorder.lap("attach", ((job, 0),), received=self._exchange.received - before)
                return Answer(seconds=time.perf_counter() - started)
            case Attach() if self.number > 0:
                request = Attach(request.job)  # what it resumes from comes from the first process
        assert not isinstance(request, Load)
        events = self.worker.execute(request)
        return Answer(tuple(events), time.perf_counter() - started)

    def close(self) -> None:
        """Leave the group."""
        if self._made_exchange is not None:
            self._made_exchange.close()


def serve(address: Address, key: bytes, number: int) -> None:
    """Do what the coordinator sends until it closes the link.

    Raises:
        OSError: the coordinator is not there.
        multiprocessing.AuthenticationError: the key is another one.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # sent to all processes of a terminal: the coordinator answers
    channel = connect(address, key)
    channel.send(Hello(number, socket.gethostname(), os.getpid()))
    recorder = SpanRecorder()
    busy = threading.Event()
    threading.Thread(target=_beat, args=(channel, busy), daemon=True, name="beat").start()
    replica: Replica | None = None
    while True:
        try:
            request: Request = channel.receive()
        except (EOFError, OSError):
            break
        busy.set()
        began = recorder.clock()
        try:
            with recorder.request():
                if isinstance(request, Load):
                    replica = Replica(number, request, recorder)
                    answer = Answer()
                else:
                    assert replica is not None
                    answer = replica.answer(request)
            spans = recorder.take()
            reply: Answer | Refusal = replace(answer, began=began, ended=recorder.clock(), spans=spans)
        except PlaitError as error:
            reply = Refusal(error)
        busy.clear()
        channel.send(reply)
    if replica is not None:
        replica.close()


def _beat(channel: Channel, busy: threading.Event) -> None:
    """Say every second of a request that this process lives; end it where the coordinator has ended."""
    while True:
        busy.wait()
        time.sleep(BEATS)
        try:
            if busy.is_set():
                channel.send(Beat())
        except OSError:
            os._exit(1)  # it may be waiting for processes that are dead, too


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Serve the coordinator that the environment names."""
    host, _, port = environment[ADDRESS].rpartition(":")
    serve((host, int(port)), bytes.fromhex(environment[KEY]), int(environment[NUMBER]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

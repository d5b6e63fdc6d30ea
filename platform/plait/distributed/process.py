"""One process of a run: it holds a replica of the base model and does what the coordinator sends.

Started as ``python -m plait.distributed`` with the coordinator's address in the environment. A seam: that
program imports it only once it is set how Python collects objects.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from plait.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    ConfigError,
    LostProcessError,
    PlaitError,
    StorageError,
    choices,
)
from plait.core.jobs import DataSpec
from plait.core.messages import Attach, Command, SaveCheckpoint
from plait.core.samples import TokenisedData
from plait.distributed.channel import (
    Answer,
    Beat,
    Build,
    Channel,
    Choose,
    Goodbye,
    Hello,
    Join,
    Load,
    Measure,
    Provide,
    Refusal,
    See,
    Share,
    TakeTiles,
    VersionError,
    connect,
    limit_links,
)
from plait.distributed.exchange import Exchange
from plait.distributed.layout import Layout
from plait.distributed.links import Links
from plait.distributed.places import ADDRESS, KEY, LOCAL, NUMBER, Address, interface_of
from plait.distributed.replica_stage import ReplicaStage
from plait.distributed.stage_worker import StageWorker
from plait.distributed.start import AGAIN
from plait.distributed.tensor import ShardGroup, TensorGroup
from plait.engine.catalogue import DataCatalogue
from plait.engine.devices import (
    Cores,
    choose_device,
    choose_kernels,
    device_bytes,
    device_kind,
    product_rate,
)
from plait.engine.local_worker import LocalWorker
from plait.engine.replicas import model_time, stage_layers
from plait.engine.span_recorder import SpanRecorder
from plait.models.base import BaseModel
from plait.models.load import inspect_model, load_part
from plait.models.parts import Part
from plait.utils.paths import cache_dir
from plait_kernels.autotuning import take

BEATS = 1.0  # seconds between two signs of life
SEEN_SECONDS = 5.0  # after which a file that another host has made is there, if the folder is shared
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Request = Load | See | Join | Choose | TakeTiles | Build | Measure | Provide | Share | Command


class Replica:
    """The base model of this process, its worker and its link to the other processes.

    Args:
        channel: to the coordinator.
        local: its number on its host, which says which GPU it takes.

    Attributes:
        digest: of the base model.
    """

    def __init__(self, channel: Channel, local: int, request: Load, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self.number = 0
        self._channel = channel
        self._device = choose_device(request.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._settings = request.model
        self._shape = inspect_model(request.model, cache=cache_dir())
        self.digest = self._shape.digest
        self._dtype: torch.dtype = getattr(torch, request.model.dtype)
        self._model: BaseModel | None = None  # until it is known which part is wanted
        self._data: dict[DataSpec, TokenisedData] = {}
        self._contents: dict[str, TokenisedData] = {}  # by digest
        self._made_exchange: Exchange | None = None
        self._unreached = 0.0
        self._worker: LocalWorker | None = None

    def _have(self, part: Part) -> BaseModel:
        """The part of the model; it is read if it is not here, and then what is here is freed before."""
        model = self._model
        if model is None or not model.has(part):
            self._worker = self._model = model = None
            model = load_part(self._settings, part, cache=cache_dir(), device=self._device)
            self._recorder.lap("load")
        elif model.own != part.layers:
            model.keep(part.layers)
        self._model = model
        return model

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
            case Join():
                self.close()
                self.number, self._worker = request.number, None
                self._made_exchange = self._join(request)
                self._unreached = request.unreached
                self._limit_links()
                self._made_exchange.connected = self._limit_links
                return Answer()
            case See(file):
                _see(file)
                return Answer()
            case Choose() | TakeTiles() | Measure():
                return self._of_device(request)
            case Build():
                self._worker = self._build(request)
                self._limit_links()  # it may have made more
                return Answer(facts=self.worker.facts)
            case Provide(spec, digest, content):
                if content is not None:
                    self._contents[digest] = content
                self._data[spec] = self._contents[digest]
                return Answer()
            case Share(job, best):
                for tensor in self.worker.adapters.whole(job, best=best):
                    self._exchange.share(tensor)
                self.worker.bank.block(job).keep_own()
                self.worker.bank.refresh([job])
                self._recorder.lap("attach", ((job, 0),))
                return Answer(seconds=time.perf_counter() - started)
            case SaveCheckpoint(job) if self.number > 0 and not isinstance(self.worker, StageWorker):
                self.worker.gather_moments(job)  # the first one writes them
                self.worker.bank.block(job).whole = None
                return Answer(seconds=time.perf_counter() - started)
            case Attach() if self.number > 0 and not isinstance(self.worker, StageWorker):
                request = Attach(request.job)  # what it resumes from comes from the first process
        assert not isinstance(request, Load)
        events = self.worker.execute(request)
        return Answer(tuple(events), time.perf_counter() - started)

    def _of_device(self, request: Choose | TakeTiles | Measure) -> Answer:
        """Carry out what concerns the device and its kernels alone."""
        match request:
            case Choose(kernels):
                return Answer(kernels=choose_kernels(kernels, self._device, self._dtype))
            case TakeTiles(tiles):
                own = json.loads(tiles).get(device_kind(self._device.type), {})
                take(json.dumps(own), self._dtype)
                return Answer()
            case Measure():
                return Answer(rate=product_rate(self._device, self._dtype))

    def _build(self, request: Build) -> LocalWorker:
        data, engine = DataCatalogue(self._data.__getitem__), request.engine
        if any(shape.processes > 1 for shape in request.shapes):
            return self._build_stage(request, data)
        exchange = self._exchange
        everyone, layers = range(exchange.processes), range(self._shape.layer_count)
        sharding = ShardGroup(everyone, self.number, self._device) if request.shards else None
        exchange.deferred = request.shards
        model = self._have(Part(layers, sharding=sharding))
        part = (self.number, exchange.processes) if request.sharded else (0, 1)
        return LocalWorker(model, data, engine, recorder=self._recorder, peers=exchange, part=part)

    def _build_stage(self, request: Build, data: DataCatalogue) -> StageWorker:
        """The worker of a stage; the model is read again where layers are missing."""
        engine, split, shape = request.engine, request.split, self._shape
        time = model_time(shape.linears, shape.layer_count, shape.hidden_size, shape.vocabulary)
        layers = [
            stage_layers(time, each, split if len(split) == each else (), engine.capacity_or_usual)
            for each in (shape.pipeline for shape in request.shapes)
        ]
        layout = Layout(request.shapes, layers)
        position = layout.position(self.number)
        together = position.slices
        group = TensorGroup(together, position.slice, self._device) if len(together) > 1 else None
        model = self._have(Part(layers[position.replica][position.stage], slicing=group))
        links, recorder = Links(position.stage, self._device, position.stages), self._recorder
        if len(layers) == 1:
            own = layers[0]
            return StageWorker(model, data, engine, links=links, layers=own, recorder=recorder, group=group)
        return ReplicaStage(
            model, data, engine, links=links, layout=layout, exchange=self._exchange, recorder=recorder
        )

    def _join(self, request: Join) -> Exchange:
        """Enter the group by the network that leads to the coordinator; earlier groups do not matter.

        Raises:
            ConfigError: this host has no interface of that name.
            LostProcessError: the others are not reached.
        """
        there = [name for _, name in socket.if_nameindex()]
        if request.interface is not None and request.interface not in there:
            raise ConfigError(
                f"cluster.interface={request.interface}",
                "This host has no such network interface.",
                f"Available: {choices(there)}.",
            )
        interface = request.interface or interface_of(request.address or self._channel.near)
        if interface is not None:
            for name in INTERFACES:
                os.environ.setdefault(name, interface)
        count, seconds, limit = request.processes, request.seconds, timedelta(seconds=request.seconds)
        try:
            store = TCPStore(self._channel.far, request.port, is_master=False, timeout=limit)
            own = PrefixStore(str(request.generation), store)
            return Exchange(own, self.number, count, self._device, seconds, self._recorder)
        except (RuntimeError, ValueError) as error:
            raise LostProcessError(
                f"the other processes cannot be reached: {str(error).partition(chr(10))[0]}",
                f"Gradients use the network interface {interface or 'of the host name'}, on any port.",
                "Set cluster.interface to one through which all hosts reach each other.",
            ) from error

    def _limit_links(self) -> None:
        """Notice a network that fails between two processes, who else wait for each other and say that they
        live."""
        if self._unreached:
            limit_links(self._unreached)

    def close(self) -> None:
        """Leave the group, if it is in one."""
        if self._made_exchange is not None:
            self._made_exchange.close()
            self._made_exchange = None


def serve(address: Address, key: bytes, number: int, local: int | None = None) -> int:
    """Do what the coordinator sends until it ends the link; the exit status.

    Args:
        number: as it was launched.
        local: its number on its host; None: the same.

    Raises:
        EOFError, OSError: the coordinator is not there.
        multiprocessing.AuthenticationError: the key is another one.
        VersionError: the versions are others.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # sent to all processes of a terminal: the coordinator answers
    channel = connect(address, key)
    memory = device_bytes(torch.device("cpu"))
    channel.send(Hello(number, socket.gethostname(), os.getpid(), Cores.here(), memory))
    recorder = SpanRecorder()
    busy = threading.Event()
    threading.Thread(target=_beat, args=(channel, busy), daemon=True, name="beat").start()
    replica: Replica | None = None
    status = AGAIN
    while True:
        try:
            request: Request | Goodbye = channel.receive()
        except (EOFError, OSError):
            break
        if isinstance(request, Goodbye):
            status = _end(number, request)
            break
        busy.set()
        began = recorder.clock()
        try:
            with recorder.request():
                if isinstance(request, Load):
                    replica = Replica(channel, number if local is None else local, request, recorder)
                    recorder.lap("load")
                    answer = Answer(model=replica.digest)
                else:
                    assert replica is not None
                    answer = replica.answer(request)
            spans = recorder.take()
            reply: Answer | Refusal = replace(answer, began=began, ended=recorder.clock(), spans=spans)
        except PlaitError as error:
            reply = Refusal(error)
        busy.clear()
        try:
            channel.send(reply)
        except OSError:
            break
    if status == AGAIN:
        os._exit(AGAIN)  # as in _beat: a thread may be waiting for the others
    if replica is not None:
        replica.close()
    return status


def _see(file: Path) -> None:
    """Wait until a file is there, which another host has just made.

    Raises:
        StorageError: it is not.
    """
    end = time.monotonic() + SEEN_SECONDS
    while not file.exists():
        if time.monotonic() > end:
            raise StorageError(
                f"{file.parent} on {socket.gethostname()} is not the folder that the coordinator has",
                "The first process writes checkpoints and adapters, and each stage reads them.",
                "Put tracking.root where all hosts see the same files.",
            )
        time.sleep(0.1)


def _end(number: int, goodbye: Goodbye) -> int:
    if not goodbye.reason:
        return EXIT_DONE
    _say(number, goodbye.reason)
    return EXIT_BAD_INPUT if goodbye.wrong else EXIT_DONE  # a launcher may end all where one fails


def _say(number: int, text: str) -> None:
    print(f"plait: process {number} ({socket.gethostname()}): {text}", file=sys.stderr, flush=True)


def _beat(channel: Channel, busy: threading.Event) -> None:
    """Say every second of a request that this process lives; end it where the coordinator has ended."""
    while True:
        busy.wait()
        time.sleep(BEATS)
        try:
            if busy.is_set():
                channel.send(Beat())
        except OSError:
            os._exit(AGAIN)  # it may be waiting for processes that are dead, too


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Serve the coordinator that the environment names."""
    host, _, port = environment[ADDRESS].rpartition(":")
    number = int(environment[NUMBER])
    try:
        return serve((host, int(port)), environment[KEY].encode(), number, int(environment[LOCAL]))
    except AuthenticationError:
        _say(number, f"the coordinator at {host}:{port} has a different key ({KEY} or cluster.key_file)")
        return EXIT_BAD_INPUT
    except VersionError as error:
        _say(number, str(error))
        return EXIT_BAD_INPUT
    except (EOFError, OSError) as error:
        _say(number, f"the coordinator at {host}:{port} does not answer ({error})")
        return AGAIN

"""Work on a device that is recorded once and replayed: CUDA graphs of whole microbatches.

A small microbatch takes the host longer than the device. A replay takes it one call, but finds the device's
tensors where they were, and everything else as it was: grids, sizes, numbers. So what is recorded must have
sizes that do not change (`routing.Padding`), and what does change must be uploaded to places that stay
(`uploads.Places`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from plait_kernels.errors import KernelError
from plait_kernels.routing import Routing
from plait_kernels.tables import Key, made_tables, make_tables
from plait_kernels.uploads import Places, refused

_log = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")
Result = TypeVar("Result")
MOST = 32  # recordings that are kept, each with the memory of its activations' places


class Recorder(Protocol):
    """How a device records."""

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record what it asks of the device, which does nothing of it yet; what is returned replays it, and
        returns what ``run`` returned, in the same places with new values."""

    def forget(self) -> None:
        """Nothing that was recorded is replayed any more: its memory may go to others."""


class CudaRecorder:
    """CUDA graphs, which share memory: each is replayed before what another one returned is needed."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """See :class:`Recorder`."""
        graph: Any = torch.cuda.CUDAGraph()
        own: Any = torch.cuda.stream(torch.cuda.current_stream())  # after a refusal torch stays on another
        with own, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = run()
        self._pool = self._pool or graph.pool()

        def replay() -> Any:
            graph.replay()
            return found

        return replay

    def forget(self) -> None:
        """See :class:`Recorder`. Torch refuses to share the memory of graphs that are gone."""
        self._pool = None


@dataclass(frozen=True, slots=True)
class _Recording(Generic[Result]):
    """What replays it, and where its uploads go. What was loaded is not kept: it has the adapters of then,
    which may be detached."""

    places: Places
    tables: tuple[Key, ...]
    replay: Callable[[], Result]


class Recordings(Generic[Loaded, Result]):
    """Microbatches by their sizes: the first of a kind runs as ever, which makes what is made once; the
    second is recorded and replayed, and so are those after it.

    Args:
        recorder: of the device.
        routing_of: the routing of what was loaded, whose tables are made as layers need them.
        run: computes what was loaded; its uploads have been made.

    Attributes:
        replays: how often one was replayed.
        refusals: why sizes are not recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        routing_of: Callable[[Loaded], Routing],
        run: Callable[[Loaded], Result],
    ) -> None:
        self._recorder, self._routing_of, self._run = recorder, routing_of, run
        self._tables: dict[Hashable, tuple[Key, ...]] = {}  # of kinds that have run once
        self._kept: OrderedDict[Hashable, _Recording[Result]] = OrderedDict()
        self.replays = 0
        self.refusals: dict[Hashable, str] = {}

    def compute(self, sizes: Hashable, load: Callable[[], Loaded]) -> tuple[Loaded, Result]:
        """What ``load`` returns, and what ``run`` makes of it.

        Args:
            sizes: all that a recording depends on but the values that are uploaded.
            load: makes the uploads.
        """
        known = self._kept.get(sizes)
        if known is not None:
            self._kept.move_to_end(sizes)
            loaded = self._load(known.places, known.tables, load)
            self.replays += 1
            return loaded, known.replay()
        tables = self._tables.get(sizes)
        if tables is None or sizes in self.refusals:
            loaded = load()
            found = self._run(loaded)
            self._tables[sizes] = made_tables(self._routing_of(loaded))
            return loaded, found
        return self._record(sizes, tables, load)

    def forget(self) -> None:
        """Let go of all recordings and their memory; each is made again when it is needed."""
        self._kept.clear()
        self._recorder.forget()

    def _load(self, places: Places, tables: tuple[Key, ...], load: Callable[[], Loaded]) -> Loaded:
        with places.filled():
            loaded = load()
            make_tables(self._routing_of(loaded), tables)
        return loaded

    def _record(
        self, sizes: Hashable, tables: tuple[Key, ...], load: Callable[[], Loaded]
    ) -> tuple[Loaded, Result]:
        places = Places()
        loaded = self._load(places, tables, load)

        def run() -> Result:
            with refused():
                return self._run(loaded)

        try:
            replay = self._recorder.record(run)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, KernelError) as refusal:  # it waits for the device, or uploads something
            self.refusals[sizes] = str(refusal)
            _log.warning("Launched one by one, since they cannot be recorded: %s\n%s", sizes, refusal)
            loaded = load()  # again: what was made for the first was recorded, and never computed
            return loaded, self._run(loaded)
        self._kept[sizes] = _Recording(places, tables, replay)
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)
        self.replays += 1
        return loaded, replay()

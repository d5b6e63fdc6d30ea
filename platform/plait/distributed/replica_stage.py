"""The worker of one stage where there are several replicas, which may be cut at different layers.

A seam: a stage alone (:mod:`plait.distributed.stage_worker`) knows no other replica. Here gradients of the
same layers are added up over the replicas, and only then the norm by which a job steps is known. So norms do
not travel with hidden states (:mod:`plait.distributed.replica_run`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.messages import RunSchedule, WorkerEvent
from plait.core.settings import EngineSettings
from plait.distributed.exchange import Exchange, Region, Sum
from plait.distributed.layout import Layout, Piece
from plait.distributed.links import Links
from plait.distributed.replica_run import ReplicaRun
from plait.distributed.stage_worker import StageWorker
from plait.engine.catalogue import DataCatalogue
from plait.engine.span_recorder import SpanRecorder
from plait.models.base import BaseModel
from plait.models.slices import LayerSlice
from plait.planner.instructions import Key
from plait.simulate.lowering import Lowering
from plait_kernels.bank import GRADIENTS, Block, Site


class ReplicaStage(StageWorker):
    """A :class:`~plait.engine.worker.Worker` for one stage of one of several replicas.

    Args:
        layout: of all processes.
    """

    def __init__(
        self,
        model: BaseModel,
        data: DataCatalogue,
        settings: EngineSettings,
        *,
        links: Links,
        layout: Layout,
        exchange: Exchange,
        recorder: SpanRecorder,
    ) -> None:
        self._layout, self._exchange = layout, exchange
        self._position = layout.position(exchange.process)
        layers = layout.layers[self._position.replica]
        super().__init__(model, data, settings, links=links, layers=layers, recorder=recorder)
        self._pieces: list[tuple[Piece, dist.ProcessGroup]] = []
        # What each process of a stage has of every layer, by how many they are; one has all of it.
        self._slices: dict[int, list[Mapping[str, LayerSlice]]] = {
            count: [model.slices_of(number, count) if count > 1 else {} for number in range(count)]
            for count in {shape.tensor for shape in layout.shapes}
        }
        self._stage_run = self._replica_run = ReplicaRun(self, links, links.process)

    def _run_window(self, command: RunSchedule) -> list[WorkerEvent]:
        """Run a schedule to its end; before the first one, all processes make their groups."""
        if not self._pieces:
            pieces = self._layout.pieces()
            groups = self._exchange.groups([each.processes for each in pieces])
            self._pieces = [
                (each, groups[each.processes]) for each in pieces if self._exchange.process in each.processes
            ]
        # A batch may have nothing here, so steps are not counted on from one schedule to the next.
        self._lowering = Lowering(len(self._layers))
        self._replica_run.keys = [(each.job, each.step) for each in command.steps]
        return super()._run_window(replace(command, drained=True))

    def begin(self, key: Key) -> Future[float]:
        """Begin to add up a job's gradients over the replicas; the norm of the sum, not a number where the
        job failed here."""
        block, failed = self.bank.block(key[0]), key[0] in self._failed
        sums = [self._sum(block, piece, group) for piece, group in self._pieces]

        def squares() -> Tensor:
            """By site, after a place for what is not finite; of each number, one process says it."""
            found = torch.zeros(1 + len(self._model.linears), dtype=torch.float64)
            for site in self.bank.sites if self._position.replica == 0 else ():
                own = (each.double().square().sum() for each in self._counted(block, site))
                found[1 + site.module] = sum(map(float, own))
            found[0] = math.nan if failed else 0.0
            return found.to(self._model.device)

        return self._exchange.add_pieces(sums, squares, (key,))

    def _sum(self, block: Block, piece: Piece, group: dist.ProcessGroup) -> Sum:
        """A job's gradients of a piece."""
        sites = [site for site in self._model.sites_of(piece.layers) if site.name in block.layout.specs]
        own = list(chain.from_iterable(block.at(site, GRADIENTS) for site in sites))
        if not own or len(piece.processes) == len(piece.holders):
            return Sum(group, piece.processes, own)
        linears = (self._model.linears[site.module] for site in sites)
        sizes = (((block.rank, each.in_features), (each.out_features, block.rank)) for each in linears)
        regions = [
            list(chain.from_iterable(_regions(slices.get(site.name)) for site in sites))
            for held in piece.holders
            for slices in self._slices[len(held)]
        ]
        return Sum(group, piece.processes, own, list(chain.from_iterable(sizes)), regions)

    def _counted(self, block: Block, site: Site) -> Iterator[Tensor]:
        """What this process counts of the norm of a site's gradients, where replicas have the same."""
        if site.name not in block.layout.specs:
            return
        gradients = block.at(site, GRADIENTS)
        if (part := self._model.slices.get(site.name)) is None:
            yield from gradients  # of a variant, maybe not two
            return
        a, b = gradients
        own, shared = (a, b) if part.side == "in" else (b, a)
        if self._position.slice == 0:
            yield shared
        if self._position.slice == part.holders[0]:
            yield own

    def finish(self, begun: Sequence[Future[float]], keys: Sequence[Key]) -> list[float]:
        """Wait for the norms of sums.

        Raises:
            LostProcessError: another process died.
        """
        norms = [self._exchange.result(each) for each in begun]
        self._recorder.lap("exchange", tuple(keys))
        return norms


def _regions(part: LayerSlice | None) -> tuple[Region, Region]:
    """The parts of A (rank, in) and B (out, rank) that a process has."""
    every = slice(None)
    if part is None:
        return (every, every), (every, every)
    return ((every, part.own), (every, every)) if part.side == "in" else ((every, every), (part.own, every))

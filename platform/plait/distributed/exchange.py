"""What the processes of a run tell each other directly: sums of gradients and copies of adapters.

A seam: shards will exchange in other ways, through the same groups. Sums are added in the order of the
processes, so their bits do not depend on who was first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from plait.core.errors import LostProcessError, ShortStageError
from plait.engine.memory import ran_out
from plait.engine.span_recorder import SpanRecorder, Work

# Longest wait in an exchange: a replica may compute for long while the others wait. If one
# is lost, the coordinator closes the links of all, and their beats end them.
LONGEST = timedelta(days=1)
PIECE = 2**20  # numbers that are gathered at a time: bounds the memory of a sum
Result = TypeVar("Result")
Region = tuple[slice, slice]  # of a matrix


@dataclass(frozen=True, slots=True)
class Sum:
    """Matrices of this process, to be added to those of other ones.

    Attributes:
        group: these processes.
        members: their numbers, in the order in which they are added.
        shapes: of the whole matrices, where members have different parts of them; empty: all have the same.
        regions: then what of each matrix each member has.
    """

    group: dist.ProcessGroup
    members: Sequence[int]
    matrices: Sequence[Tensor]
    shapes: Sequence[tuple[int, int]] = ()
    regions: Sequence[Sequence[Region]] = ()


class Exchange:
    """A process's membership in the group of all processes, as its worker's
    :class:`~plait.engine.local_worker.Peers`.

    Sums are made in a thread while the process computes, one after another in the order in which they were
    begun, which is the same in all processes.

    Args:
        store: in which they find each other; a part of its own for each group.
        seconds: longest wait for the others to come together.
        recorder: of the process's spans.

    Attributes:
        process: number of this one.
        processes: how many there are.
        deferred: whether sums only begin when all are waited for: the calling thread gathers weights from the
            same processes meanwhile, and NCCL needs one order of both in all of them.
        connected: called when processes have made more links.
    """

    deferred = False
    connected: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        store: Store,
        process: int,
        processes: int,
        device: torch.device,
        seconds: float,
        recorder: SpanRecorder,
    ) -> None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=process,
            world_size=processes,
            timeout=timedelta(seconds=seconds),
        )
        self._recorder = recorder
        self.process, self.processes = process, processes
        self._device = device
        self._any(False)  # NCCL connects at the first exchange
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(LONGEST)
        self._thread = ThreadPoolExecutor(1, "exchange", initializer=self._on_own_stream)
        self._begun: list[Future[None]] = []
        self._later: list[Callable[[], None]] = []

    def _on_own_stream(self) -> None:
        """What the thread does on a GPU runs beside what computes there."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def _synchronise(self) -> None:
        """Wait for what the calling thread has sent to the GPU."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    # ---- sums --------------------------------------------------------------------------------------------

    def add_up(self, gradients: Tensor, job: str, step: int) -> None:
        """Begin to put the sum over all processes into this vector of a job, whose values are there."""
        self._later.append(partial(self._sum, gradients, ((job, step),)))
        if not self.deferred:
            self._begin()

    def _begin(self) -> None:
        """Begin the sums that are to be made; on a GPU behind what the calling thread has sent there, for
        which neither thread waits."""
        behind = self._sent()
        self._begun += [self._thread.submit(self._behind, behind, each) for each in self._later]
        self._later.clear()

    def _sent(self) -> torch.cuda.Event | None:
        """The point after what this thread has sent to the GPU."""
        if self._device.type != "cuda":
            return None
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record()
        return sent

    def _behind(self, sent: torch.cuda.Event | None, run: Callable[[], None]) -> None:
        if sent is not None:
            torch.cuda.current_stream().wait_event(sent)
        run()

    def finish(self, *, short: bool) -> bool:
        """Wait for the sums that were begun; whether one of the processes is ``short`` of memory.

        Raises:
            LostProcessError: another process died, or does not take part.
        """
        self._begin()
        agreed = self._thread.submit(self._any, short)
        begun, self._begun = self._begun, []
        for each in begun:
            self.result(each)
        return self.result(agreed)

    def groups(self, holders: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Groups of these processes, which all processes make in the same order."""
        made = {own: dist.new_group(own, timeout=LONGEST) for own in dict.fromkeys(holders)}
        self.connected()
        return made

    def add_pieces(
        self,
        sums: Sequence[Sum],
        squares: Callable[[], Tensor],
        work: Work,
    ) -> Future[float]:
        """Begin to put sums into their matrices; the norm of all of them, from ``squares`` of
        all processes, which are asked for when this process's sums are there."""
        self._synchronise()
        return self._thread.submit(self._add_pieces, sums, squares, work)

    def _add_pieces(self, sums: Sequence[Sum], squares: Callable[[], Tensor], work: Work) -> float:
        for each in sums:
            if each.regions:
                self._sum_regions(each, work)
            elif each.matrices:
                vector = torch.cat([matrix.flatten() for matrix in each.matrices])
                self._sum(vector, work, each.group)
                spread(vector, each.matrices)
        of_all = (each for part in self._all(squares()) for each in part.tolist())
        self._synchronise()
        return math.sqrt(sum(of_all))

    def _sum(self, vector: Tensor, work: Work, group: dist.ProcessGroup | None = None) -> None:
        began = self._recorder.clock()
        add_in_order(vector, lambda piece: self._all(piece.contiguous(), group))
        self._synchronise()
        self._recorder.add_beside(began, work, (dist.get_world_size(group) - 1) * vector.nbytes)

    def _sum_regions(self, each: Sum, work: Work) -> None:
        """Each member sends what it has, and all add that into the whole matrices."""
        began, process, received = self._recorder.clock(), self.process, 0
        wholes = [torch.zeros(shape, device=self._device) for shape in each.shapes]
        own = torch.cat([matrix.flatten() for matrix in each.matrices])
        for member, regions in zip(each.members, each.regions, strict=True):
            views = [whole[region] for whole, region in zip(wholes, regions, strict=True)]
            part = own if member == process else own.new_empty(sum(view.numel() for view in views))
            dist.broadcast(part, src=member, group=each.group)
            received += 0 if member == process else part.nbytes
            sizes = [view.numel() for view in views]
            for view, found in zip(views, torch.split(part, sizes), strict=True):
                view.add_(found.view(view.shape))
        here = each.regions[each.members.index(process)]
        for matrix, whole, region in zip(each.matrices, wholes, here, strict=True):
            matrix.copy_(whole[region])
        self._synchronise()
        self._recorder.add_beside(began, work, received)

    def _any(self, own: bool) -> bool:
        said = self._all(torch.tensor([own], dtype=torch.uint8, device=self._device))
        return any(bool(each.item()) for each in said)

    def _all(self, own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """This tensor of each process of a group, in their order."""
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        return parts

    # ---- copies ------------------------------------------------------------------------------------------

    def fill(self, vectors: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Take each part of these vectors from the process whose number it has.

        Raises:
            LostProcessError: as :meth:`finish`.
        """
        self._synchronise()
        self.result(self._thread.submit(self._fill, vectors))

    def _fill(self, vectors: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        for vector, parts in vectors:
            for owner, part in enumerate(parts):
                if part.start < part.stop:
                    dist.broadcast(vector[part], src=owner)
        self._synchronise()

    def share(self, tensor: Tensor) -> None:
        """Copy a tensor of the first process to all others.

        Raises:
            LostProcessError: as :meth:`finish`.
        """
        sent = tensor.to(self._device)
        self._synchronise()
        self.result(self._thread.submit(self._broadcast, sent))
        if sent is not tensor:
            tensor.copy_(sent)

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)
        self._synchronise()

    def result(self, begun: Future[Result]) -> Result:
        """What was begun, once it is done.

        Raises:
            LostProcessError: another process died, or does not take part.
        """
        rule = "The processes of a run exchange gradients and adapters directly."
        return over_link(begun.result, "the other processes", rule)

    def close(self) -> None:
        """Leave the group."""
        self._thread.shutdown()
        dist.destroy_process_group()


def over_link(action: Callable[[], Result], to: str, rule: str) -> Result:
    """What an action returns that needs other processes.

    Raises:
        ShortStageError: memory ran out meanwhile.
        LostProcessError: the link to them broke.
    """
    try:
        return action()
    except (RuntimeError, ValueError, MemoryError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        if ran_out(error):
            remedy = "Lower engine.capacity or planner.max_jobs, or set engine.checkpointing."
            raise ShortStageError(f"no memory for what {to} send: {said}", rule, remedy) from error
        remedy = "The same command resumes the search."
        raise LostProcessError(f"the link to {to} broke: {said}", rule, remedy) from error


def add_in_order(vector: Tensor, gather: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Put the sum of a vector of several processes into it, in the order in which they are gathered."""
    for piece in torch.split(vector, PIECE):
        first, *others = gather(piece)
        piece.copy_(first)
        for other in others:
            piece.add_(other)


def spread(vector: Tensor, matrices: Sequence[Tensor]) -> None:
    """Put the parts of a vector into these matrices."""
    parts = torch.split(vector, [matrix.numel() for matrix in matrices])
    for matrix, part in zip(matrices, parts, strict=True):
        matrix.copy_(part.view(matrix.shape))

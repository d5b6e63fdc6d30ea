"""Packs the global batches of a step into microbatches; of several replicas, says which takes which samples.

An engine of one stage gains nothing from a least full microbatch that is emptier, so only the number of
microbatches counts. The lower bound settles almost every packing at once; the exact packer is asked for the
others, with limits that count rounds and nodes: the same batches make the same microbatches on every machine,
in every run and after a restart. For the same reason, samples are dispatched to replicas by the arithmetic
that they take or by a stored profile, never by what was measured in this run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from plait.core.plans import GlobalBatch, Microbatch, Replica
from plait.cost.replica import Configuration
from plait.cost.time import LayerTime, TimeModel
from plait.planner.dispatch_step import Batches, Dispatcher
from plait.planner.packing import PackedBatches, check_fits, first_fit_decreasing
from plait.planner.packing_exact import PackingLimits, packed_batches
from plait.planner.subset_sums import bins_bound
from plait.planner.verify import verify_contents

# A step takes a tenth of a second at the least; what may be spent on saving one microbatch is a few
# milliseconds. ``gap=1``: the least full microbatch is good as it is.
STEP_LIMITS = PackingLimits(exact_samples=0, nodes=20, gap=1.0, seconds=2.0, variables=400)

_BY_TOKENS = TimeModel(1, {1: LayerTime(0.0, 1e-6)})
Microbatches = tuple[Microbatch, ...]


class Packer:
    """Packs global batches of different jobs into microbatches: as few as the exact packer finds.

    Args:
        replicas: with their capacities, which bound memory. No engine stores padding rows, and the kernels'
            partial tiles cost none, so P is 1 here.
        time: seconds of a microbatch on a replica of speed 1; None: by tokens.

    Attributes:
        repeats: whether packing the same again gives the same; False once the clock stopped the solver.
    """

    def __init__(self, replicas: Sequence[Replica], time: TimeModel | None = None) -> None:
        self.repeats = True
        self._capacities = {each.id: each.capacity or 0 for each in replicas}
        time = time or _BY_TOKENS
        kinds = [
            (
                each.id,
                Configuration(1, each.pp, each.capacity or 0, layer_split=each.layer_split),
                time.at_speed(each.speed),
            )
            for each in replicas
        ]
        self._dispatcher = Dispatcher(kinds) if len(kinds) > 1 else None
        self._ahead: tuple[Batches, Future[Microbatches]] | None = None
        self._thread = ThreadPoolExecutor(1, "packer")  # starts none before it is used

    @property
    def capacity(self) -> int:
        """Most tokens of a microbatch on any replica."""
        return max(self._capacities.values())

    def prepare(self, batches: Iterable[GlobalBatch]) -> None:
        """Begin to pack what probably comes next, if there are several replicas: one is as soon done."""
        if self._dispatcher is not None and (asked := tuple(batches)):
            self._ahead = asked, self._thread.submit(self._pack, asked)

    def close(self) -> None:
        """End its thread; what is being prepared is not needed."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def pack(self, batches: Iterable[GlobalBatch]) -> Microbatches:
        """Microbatches that hold all samples of these batches: those prepared, if they are of the same.

        Raises:
            CapacityError: a sample alone is longer than the capacity of all replicas.
        """
        asked, ahead = tuple(batches), self._ahead
        if ahead is not None:
            wait([ahead[1]])  # two at a time gain nothing
            if ahead[0] == asked:
                self._ahead = None
                return ahead[1].result()
        return self._pack(asked)  # of an evaluation in between: what is prepared stays

    def _pack(self, batches: Batches) -> Microbatches:
        if self._dispatcher is None:
            check_fits(batches, capacity=self.capacity)
            return self.bins(batches, self.capacity).microbatches()
        labelled = sum(1.0 / batch.loss_weight for batch in batches if batch.loss_weight)
        tokens = sum(sum(batch.lengths) for batch in batches)
        parts = self._dispatcher.parts(batches, labelled / tokens)
        packed = [
            (replica, each)
            for replica, own in parts.items()
            if own
            for each in self.bins(own, self._capacities[replica]).microbatches()
        ]
        made = tuple(
            replace(each, replica=replica, index=index) for index, (replica, each) in enumerate(packed)
        )
        verify_contents(made, batches, self._capacities)
        return made

    def bins(self, batches: Sequence[GlobalBatch], capacity: int) -> PackedBatches:
        """The samples of each microbatch of these batches."""
        lengths = [batch.lengths for batch in batches]
        simple = first_fit_decreasing(lengths, capacity=capacity)
        first = PackedBatches(tuple(batches), tuple(map(tuple, simple)))
        if len(simple) <= 1 or len(simple) == bins_bound(lengths, capacity=capacity):
            return first
        better = packed_batches(batches, capacity=capacity, limits=STEP_LIMITS)
        self.repeats = self.repeats and better.limit_hit != "time"
        return better if len(better.bins) < len(simple) else first

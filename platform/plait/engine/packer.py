"""Packs what goes through the model together: first-fit, or exactly where that saves a microbatch.

An engine of one stage gains nothing from a least full microbatch that is emptier, so only their number
counts. The lower bound settles almost every batch at once; the exact packer is asked for the others, with
limits that count rounds and nodes: the same batches make the same microbatches on every machine, in every
run and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.plans import GlobalBatch, Microbatch
from plait.planner.packing import PackedBatches, check_fits, first_fit_decreasing
from plait.planner.packing_exact import PackingLimits, packed_batches
from plait.planner.subset_sums import bins_bound

# A step takes a tenth of a second at the least; what may be spent on saving one microbatch is a few
# milliseconds. ``gap=1``: the least full microbatch is good as it is.
STEP_LIMITS = PackingLimits(exact_samples=0, nodes=20, gap=1.0, seconds=2.0, variables=400)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Microbatches of one step, or of one evaluation.

    Attributes:
        repeats: whether packing the same again gives the same; False where the clock stopped the solver.
    """

    microbatches: tuple[Microbatch, ...]
    repeats: bool = True


def pack_step(batches: Sequence[GlobalBatch], *, capacity: int) -> PackedStep:
    """Microbatches that hold all samples of ``batches``: as few as the exact packer finds.

    Args:
        batches: global batches of different jobs.
        capacity: most tokens of a microbatch. It bounds memory, and no engine stores padding rows: the
            kernels' partial tiles cost none, so that P is 1 here.

    Raises:
        CapacityError: a sample alone is longer than the capacity.
    """
    check_fits(batches, capacity=capacity)
    lengths = [batch.lengths for batch in batches]
    simple = first_fit_decreasing(lengths, capacity=capacity)
    first = PackedBatches(tuple(batches), tuple(map(tuple, simple)))
    if len(simple) <= 1 or len(simple) == bins_bound(lengths, capacity=capacity):
        return PackedStep(first.microbatches())
    better = packed_batches(batches, capacity=capacity, limits=STEP_LIMITS)
    repeats = better.limit_hit != "time"
    chosen = better if len(better.bins) < len(simple) else first
    return PackedStep(chosen.microbatches(), repeats)

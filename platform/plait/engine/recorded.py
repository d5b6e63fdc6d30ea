"""Small microbatches of a GPU as CUDA graphs: filled up to a few sizes, recorded, replayed.

A seam: the worker asks for the losses of a microbatch; whether its kernels are launched one by one or
replayed is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from plait.engine.microbatches import Gathered, LoadedMicrobatch, Sizes
from plait_kernels import Bank, Routing
from plait_kernels.recordings import CudaRecorder, Recorder, Recordings


class RecordedTraining:
    """Forward and backward of small microbatches, replayed.

    A microbatch is filled up the same way whether it is launched or replayed, so its bits are the same.

    Args:
        compute: forward and backward of a loaded microbatch; the loss of each labelled row.
        most: tokens of the largest microbatch, as filled up.
        longest: tokens of the model's longest sample.
    """

    def __init__(
        self,
        bank: Bank,
        compute: Callable[[LoadedMicrobatch], Tensor],
        *,
        most: int,
        longest: int,
        recorder: Recorder | None = None,
    ) -> None:
        self._bank, self._most, self._longest = bank, most, longest
        self.recordings = Recordings(recorder or CudaRecorder(), _routing, compute)

    def run(self, gathered: Gathered) -> tuple[LoadedMicrobatch, Tensor] | None:
        """What was loaded of it, and the loss of each labelled row; None if it is too large, or has adapters
        that are computed on the host's word."""
        sizes = Sizes.of(gathered, self._bank, longest=self._longest)
        if sizes is None or sizes.tokens > self._most:
            return None
        filled = gathered.filled(sizes)
        return self.recordings.compute(sizes, lambda: self._load(filled))

    def forget(self) -> None:
        """Let go of all recordings, and of their memory, which no prediction counts."""
        self.recordings.forget()

    def _load(self, gathered: Gathered) -> LoadedMicrobatch:
        loaded = gathered.loaded(self._bank, training=True)
        loaded.context.fix(len(gathered.tokens))
        return loaded


def _routing(loaded: LoadedMicrobatch) -> Routing:
    routing = loaded.context.routing
    assert isinstance(routing, Routing)  # of training
    return routing

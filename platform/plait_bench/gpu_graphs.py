"""Small microbatches of an 8B model on a GPU, launched and replayed as CUDA graphs: seconds, bits and memory.

No microbatch of it is trained on: gradients are added up and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.core.checks import check
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.plans import Microbatch, Segment
from plait.core.settings import RunSettings
from plait.engine.devices import choose_device
from plait.engine.microbatches import TOKENS, Gathered, LoadedMicrobatch, Sizes
from plait.engine.recorded import RecordedTraining
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.gpu_step import JointModel, JointOptions
from plait_bench.random_model import dtype_on
from plait_kernels.bank import GRADIENTS
from plait_kernels.recordings import Recorder

_REPLAYS = 3  # of a size before it is timed; the first is recorded, too


@dataclass(frozen=True, slots=True)
class GraphOptions(JointOptions):
    """Options of ``gpu_graphs``.

    Attributes:
        sizes: tokens of the microbatches, each with one sample of every adapter.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        check(self, OPTIONS)
        most = self.adapters * self.length
        if wrong := [size for size in self.sizes if not 0 < size <= most or size % self.adapters]:
            raise ConfigError(
                f"{OPTIONS}.sizes={wrong}",
                f"Each of {self.adapters} adapters has one sample of the same 1 to {self.length} tokens.",
                f"Choose multiples of {self.adapters} up to {most}.",
            )


@benchmark("gpu_graphs", GraphOptions)
def gpu_graphs(settings: RunSettings, _jobs: Sequence[JobSpec], asked: GraphOptions) -> Report:
    """Seconds of a small microbatch launched and replayed; whether both have the same gradients.

    Raises:
        ConfigError: a device that is not there.
    """
    device = choose_device(settings.engine.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        side = _Side(asked, settings.engine.kernels, device, dtype_on(device))
        figures = [figure for size in asked.sizes for figure in side.figures(size)]
    return Report("gpu/graphs", tuple(figures), _assumptions(asked))


class _Side(JointModel):
    """Microbatches of the model, each way.

    Args:
        recorder: of the device; None: CUDA's.
    """

    def __init__(
        self,
        asked: GraphOptions,
        kernels: str,
        device: torch.device,
        dtype: torch.dtype,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(asked, kernels, device, dtype)
        for block in self.bank.blocks.values():
            for _, b in self.bank.weights(block.adapter).values():
                nn.init.normal_(b, std=1e-3)  # of zeros S has no gradient
        self.bank.refresh()
        self.asked, most = asked, max(TOKENS[-1], 2 * max(asked.sizes))
        self.recorded = RecordedTraining(
            self.bank, self._compute, most=most, longest=asked.length, recorder=recorder
        )

    def figures(self, size: int) -> Iterator[Figure]:
        """How microbatches of so many tokens compare."""
        asked, gathered = self.asked, _gathered(self.asked, size)
        sizes = Sizes.of(gathered, self.bank, longest=asked.length)
        if sizes is None:
            yield _refused(size, f"what fills it up would have samples of more than {asked.length} tokens")
            return
        launched = self._gradients(lambda: self._compute(gathered.loaded(self.bank, training=True)))
        filled = self._gradients(lambda: self.recorded.run(gathered))  # the first of its sizes is launched
        apart = f"launched and not filled up, gradients differ by {_far(filled, launched):.1e}"
        before = self._held()
        differing = 0
        for _ in range(_REPLAYS):
            differing += not torch.equal(filled, self._gradients(lambda: self.recorded.run(gathered)))
        held = self._held() - before
        yield _refused(size, self.recorded.recordings.refusals.get(sizes, ""))
        yield Figure(
            f"{size} tokens: replays with other gradients",
            *(float(differing), "", "measured"),
            Baseline(0.0, "the same microbatch, launched", at_most=1.0),
            note=f"of {_REPLAYS}; {apart}",
        )
        yield from self._times(size, gathered, held)

    def _times(self, size: int, gathered: Gathered, held: int) -> Iterator[Figure]:
        launched, host = self._seconds(lambda: self._compute(gathered.loaded(self.bank, training=True)))
        replayed, own_host = self._seconds(lambda: self.recorded.run(gathered))
        aim = Baseline(launched, "launched", at_most=1.0)
        note = f"the host {own_host * 1e3:.1f} ms, launching {host * 1e3:.1f}; {held / 2**20:.0f} MiB more"
        yield Figure(f"{size} tokens: replayed", replayed, "s", "measured", aim, note)

    def _compute(self, loaded: LoadedMicrobatch) -> Tensor:
        """Forward and backward, as a worker has them."""
        model = self.model
        with torch.enable_grad():
            hidden = model.hidden(loaded.context)
            loss, nll = model.loss(hidden, loaded.rows, loaded.targets, loaded.weights)
        torch.autograd.backward(loss)
        return nll.detach()

    def _gradients(self, run: Callable[[], object]) -> Tensor:
        """All adapters' gradients of one microbatch."""
        self.bank.zero_gradients()
        run()
        return torch.cat([block.state[GRADIENTS].flatten() for block in self.bank.blocks.values()])

    def _seconds(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds of one in a row of them, and those until the host had asked for it."""
        hosts, repeats = [], self.asked.repeats
        self._finish()
        started = time.perf_counter()
        for _ in range(repeats):
            asked = time.perf_counter()
            run()
            hosts.append(time.perf_counter() - asked)
        self._finish()
        return (time.perf_counter() - started) / repeats, median(hosts)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _held(self) -> int:
        """Bytes of the recordings' own memory, apart from the usual pool, (0, 0)."""
        if self.device.type != "cuda":
            return 0
        cuda: Any = torch.cuda
        segments = cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0))


def _refused(size: int, why: str) -> Figure:
    """Whether microbatches of so many tokens are not recorded."""
    none = Baseline(0.0, "all are recorded", at_most=1.0)
    return Figure(f"{size} tokens: refused", float(bool(why)), "", "measured", none, note=why)


def _far(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def _gathered(asked: GraphOptions, size: int) -> Gathered:
    """A microbatch of one sample of every adapter, all as long."""
    each = size // asked.adapters
    random, labelled = np.random.default_rng(size), max(1, int(asked.labelled * each))
    tokens = random.integers(0, asked.vocabulary, each * asked.adapters)
    ends = np.arange(1, asked.adapters + 1) * each
    rows = (ends[:, None] - 1 - np.arange(labelled, 0, -1)).flatten()
    zeros, numbers = np.zeros(asked.adapters, np.int64), range(asked.adapters)
    weight = 1.0 / labelled
    segments = tuple(Segment(str(number), 1, (0,), (0,), (each,), weight) for number in numbers)
    return Gathered(
        Microbatch(0, 0, segments),
        tokens=tokens,
        lengths=np.full(asked.adapters, each),
        steps=zeros + 1,
        samples=zeros,
        draws=zeros,
        rows=rows,
        targets=tokens[rows + 1],
        weights=np.full(len(rows), weight, np.float32),
        counts=(labelled,) * asked.adapters,
    )


def _assumptions(asked: GraphOptions) -> tuple[str, ...]:
    return (
        f"random weights; {asked.adapters} adapters of rank {asked.rank}, one sample each; means of "
        f"{asked.repeats} microbatches in a row",
    )

"""mLoRA's pipelines in the simulator: tokens a second by jobs, devices and links, and bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, overload

from plait.core.checks import check
from plait.core.jobs import JobSpec
from plait.core.plans import GlobalBatch
from plait.core.settings import RunSettings
from plait.cost.time import StageTime
from plait.planner.packing_exact import GREEDY
from plait.simulate.events import OneFOneB, Order, Pipeline, Run, Work, simulate
from plait.simulate.orders import BackwardFirst, arrange
from plait.simulate.report import measure
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Figure, Report
from plait_bench.inputs import Count, Counts, Positive

TURNS = 24  # simulated steps of each job
LOSS_PASSES = 10  # of logits over a device's memory, for the loss and its gradient by plain operators
OVER = ("LoRAPP", "time saved")  # over other systems: of its tokens a second, and of seconds
WEIGHT_PASSES = 2.0  # operations of one weight on one token
# Times that hidden states pass a device's link in a layer of tensor parallelism, times (t - 1)/t: as in
# Megatron-LM, and as in mLoRA's benchmark with PyTorch, which sums up the gradients of q, k, v, gate and up
# apart, and what adapters need besides.
PASSES = 8
FORWARD_PASSES, BACKWARD_PASSES = 7, 14


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a base model: weights of its linears, features and decoder layers.

    Attributes:
        vocabulary: words of the head; 0: head, embedding and whole layers are left out.
        moved: megabytes that a token's operators between products move in a layer of mLoRA, forward and
            backward.
        mask: megabytes that a token's mask of attention moves in each stage of mLoRA.
        peft: as ``moved``, in a layer of transformers with PEFT.
        sliced: those on each device of tensor parallelism.
        split: microbatches of a batch that are compared; 0: the first of the options' ``splits``.
    """

    weights: float
    hidden: Count
    layers: Count
    vocabulary: int = 0
    moved: float = 0.0
    mask: float = 0.0
    peft: float = 0.0
    sliced: float = 0.0
    split: int = 0

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.models")

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.hidden * self.vocabulary

    def shares(self, devices: int) -> list[float]:
        """Layers of each stage; the last one, which has the head, has as many fewer as are best."""
        if devices == 1 or not self.vocabulary:
            return [self.layers / devices] * devices
        extra = self.head / (self.weights / self.layers)

        def divided(last: int) -> list[float]:
            even, more = divmod(self.layers - last, devices - 1)
            return [*(float(even + (stage < more)) for stage in range(devices - 1)), float(last)]

        even = self.layers // devices
        return min(map(divided, range(even + 1)), key=lambda own: max(own[0], own[-1] + extra))


@dataclass(frozen=True, slots=True)
class Tried:
    """Another assumption: the options that are otherwise; None for those that are as they were."""

    logits: bool | None = None
    splits: tuple[int, ...] | None = None
    teraflops: Positive | None = None
    memory_gigabytes_per_s: Positive | None = None
    gigabytes_per_s: Positive | None = None

    def __post_init__(self) -> None:
        check(self, f"{OPTIONS}.tried")

    @property
    def otherwise(self) -> dict[str, Any]:
        """Those options by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Options of the benchmarks of mLoRA's pipelines.

    Attributes:
        models: by name.
        devices: stages; each number is simulated.
        jobs: trained at once; each number is simulated, null for as many as there are stages.
        tokens: of a global batch.
        length: tokens of a sample, for attention's products; 0 leaves them out.
        splits: microbatches into which 1F1B and LoRAPP split a global batch; the first is what is compared,
            of models that have no ``split`` of their own.
        teraflops: of a device, which is assumed: with messages it decides what dominates.
        memory_gigabytes_per_s: of a device; null leaves out the operators between products, and the loss's.
        backward: seconds of a backward over those of a forward.
        gigabytes_per_s: between neighbours; null for messages that take no time.
        crossings: times that a message crosses such a link: 2 through the host.
        logits: whether the last stage sends its logits to the first device, which computes the loss, as
            mLoRA's artifact does; otherwise it is computed on the last device, as its text says.
        value_bytes: of an activation.
        beside_others: whether LoRAPP is compared with tensor parallelism and FSDP, too.
        tried: other assumptions, by what names of their figures end with.
    """

    models: dict[str, Model]
    devices: Counts
    jobs: tuple[int | None, ...]
    tokens: Count = 4096
    length: int = 0
    splits: Counts = (8,)
    teraflops: Positive = 50.0
    memory_gigabytes_per_s: Positive | None = None
    backward: Positive = 1.0
    gigabytes_per_s: Positive | None = None
    crossings: Count = 1
    logits: bool = False
    value_bytes: Count = 4
    beside_others: bool = False
    tried: dict[str, Tried] = field(default_factory=dict)

    def layer(self, model: Model, moved: float, slices: int = 1) -> float:
        """Seconds of a token's forward in a layer, on one of ``slices`` devices that share it."""
        weights = WEIGHT_PASSES * model.weights / model.layers
        products = (weights + 2 * WEIGHT_PASSES * model.hidden * self.length) / (self.teraflops * 1e12)
        return products / slices + self.between(moved) / 2

    def between(self, megabytes: float) -> float:
        """Seconds of operators that move so much through a device's memory."""
        return 1e-3 * megabytes / (self.memory_gigabytes_per_s or float("inf"))

    def head(self, model: Model) -> float:
        """Seconds of a token's forward in the head."""
        return WEIGHT_PASSES * model.head / (self.teraflops * 1e12)

    def loss(self, model: Model) -> float:
        """Seconds of a token's loss and its gradient."""
        return self.between(1e-6 * LOSS_PASSES * model.vocabulary * self.value_bytes)

    def stages(self, model: Model, devices: int, split: int) -> list[StageTime]:
        """Seconds of each stage for one microbatch."""
        found, tokens, last = [], self.tokens / split, devices - 1
        for stage, layers in enumerate(model.shares(devices)):
            token = layers * self.layer(model, model.moved) + (self.head(model) if stage == last else 0.0)
            once = self.between(model.mask)
            if stage == (0 if self.logits else last):
                once += self.loss(model)
            found.append(StageTime(tokens * (token + once), tokens * token * self.backward))
        return found

    def message(self, model: Model, split: int) -> float:
        """Seconds of one microbatch's activations between neighbours."""
        if self.gigabytes_per_s is None:
            return 0.0
        sent = self.tokens / split * model.hidden * self.value_bytes
        return self.crossings * sent / (self.gigabytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one case.

    Attributes:
        lorapp: of mLoRA's pipeline by split: jobs in turn.
        alone: of 1F1B by split, one job after another.
        plait: of Plait's schedule, its batches split as is best for it; None beside another assumption.
    """

    lorapp: Mapping[int, float]
    alone: Mapping[int, float]
    plait: float | None

    def over(self, rate: float) -> float | None:
        """Plait's over another rate."""
        return None if self.plait is None else self.plait / rate


def rates(model: Model, devices: int, jobs: int, asked: PipelineOptions, *, compared: bool = True) -> Rates:
    """Both systems' steady tokens a second, and Plait's of what is ``compared``."""
    lorapp, alone = {}, {}
    for split in asked.splits:
        batch = [Work((("job", 0),)) for _ in range(split)]
        one = simulate({0: _pipeline(batch, model, devices, split, OneFOneB([split]), asked)})
        alone[split] = asked.tokens / one.makespan
        lorapp[split] = lorapp_rate(model, devices, jobs, split, asked)
    splits = {1, *asked.splits} if compared else ()
    own = max((_plaits(model, devices, jobs, split, asked) for split in splits), default=None)
    return Rates(lorapp, alone, own)


def lorapp_rate(model: Model, devices: int, jobs: int, split: int, asked: PipelineOptions) -> float:
    """Steady tokens a second of mLoRA's pipeline, whose batches are split in so many microbatches."""
    turns = ((f"job{job}", turn) for turn in range(TURNS) for job in range(jobs))
    works = [Work((part,)) for part in turns for _ in range(split)]
    return _steady(
        simulate({0: _pipeline(works, model, devices, split, BackwardFirst(), asked)}), jobs, asked
    )


def _steady(run: Run, jobs: int, asked: PipelineOptions) -> float:
    """Tokens a second between two turns, after the pipeline filled and before it drains."""
    last, middle = (
        max(run.steps[f"job{job}", turn] for job in range(jobs)) for turn in (TURNS - 2, TURNS // 2)
    )
    return (TURNS - 2 - TURNS // 2) * jobs * asked.tokens / (last - middle)


def _plaits(model: Model, devices: int, jobs: int, split: int, asked: PipelineOptions) -> float:
    """Tokens a second of Plait's schedule with batches of ``split`` microbatches."""
    samples, lengths = tuple(range(split)), (asked.tokens // split,) * split
    batches = {
        job: [GlobalBatch(job, turn, samples, (0,) * split, lengths, 1.0) for turn in range(TURNS)]
        for job in (f"job{number}" for number in range(jobs))
    }
    found = arrange("plait", batches, stages=devices, capacity=lengths[0], limits=GREEDY)
    works = [
        Work(tuple((part.job, part.step) for part in each.segments), tokens=each.tokens)
        for each in found.microbatches
    ]
    none = StageTime(0.0, 0.0)
    seconds = [
        [whole if each.segments else none for each in found.microbatches]
        for whole in asked.stages(model, devices, split)
    ]
    message = asked.message(model, split)
    sent = [message if each.segments else 0.0 for each in found.microbatches] if message else ()
    run = simulate({0: Pipeline(works, seconds, found.order, sent, ports=range(devices))})
    return _steady(run, jobs, asked)


def _pipeline(
    works: Sequence[Work], model: Model, devices: int, split: int, order: Order, asked: PipelineOptions
) -> Pipeline:
    """mLoRA's pipeline, whose logits go to the first device as to one more stage at its port."""
    seconds = [[each] * len(works) for each in asked.stages(model, devices, split)]
    message, sizes, ports = asked.message(model, split), [1.0] * (devices - 1), [*range(devices)]
    if asked.logits:
        seconds.append([StageTime(0.0, 0.0)] * len(works))
        sizes.append(model.vocabulary / model.hidden)
        ports.append(0)
    return Pipeline(works, seconds, order, [message] * len(works) if message else (), sizes, ports)


@benchmark("mlora/pipelines", PipelineOptions)
def pipelines(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: PipelineOptions) -> Report:
    """Time of a task saved over 1F1B, and tokens a second by jobs and devices."""
    figures: list[Figure] = []
    for name, model in asked.models.items():
        for variant, at in _assumptions(model, asked):
            by_devices = {}
            for devices in asked.devices:
                counts = [each or devices for each in asked.jobs]
                case = f"{name}, {devices} devices"
                found = {count: rates(model, devices, count, at, compared=not variant) for count in counts}
                figures += _case(case, found, at, variant)
                if asked.beside_others:
                    figures += _over_others(case, model, devices, found, at, variant)
                by_devices[devices] = found
            figures += _scaling(name, by_devices, at, variant)
    assumed = f"{asked.teraflops:g} TFLOP/s a device, backward {asked.backward:g} times as long as forward"
    link = "take no time" if asked.gigabytes_per_s is None else f"at {asked.gigabytes_per_s:g} GB/s"
    return Report("mLoRA's pipelines", tuple(figures), (f"Assumed: {assumed}; messages {link}.",))


def _assumptions(model: Model, asked: PipelineOptions) -> list[tuple[str, PipelineOptions]]:
    """The assumptions for a model, with what names of figures end with: first what is compared."""
    compared = model.split or asked.splits[0]
    tried = {f", {name}": replace(asked, **each.otherwise) for name, each in asked.tried.items()}
    return [
        (ending, replace(each, splits=tuple(dict.fromkeys((compared, *each.splits)))))
        for ending, each in ({"": asked} | tried).items()
    ]


def _case(case: str, found: Mapping[int, Rates], asked: PipelineOptions, variant: str) -> list[Figure]:
    figures = []
    first = found[min(found)]
    for split in asked.splits:
        beside = _beside(split, asked, variant)
        name = f"{case}: 1F1B{beside}"
        figures.append(Figure(name, first.alone[split], "tokens/s", "simulated", plait=first.plait))
        for count, each in found.items():
            label, rate, alone = f"{case}, {count} jobs", each.lorapp[split], each.alone[split]
            saved, ours = _saved(rate / alone), _saved(each.over(alone))
            note = f"LoRAPP {rate:,.0f}, 1F1B {alone:,.0f} tokens/s, batches in {split}"
            name = f"{label}: time saved{beside}"
            figures.append(Figure(name, saved, "%", "simulated", note=note, plait=ours))
            name = f"{label}: LoRAPP{beside}"
            figures.append(Figure(name, rate, "tokens/s", "simulated", plait=each.plait))
    return figures


def _beside(split: int, asked: PipelineOptions, variant: str) -> str:
    """What names of figures end with: nothing for what is compared."""
    return ("" if split == asked.splits[0] else f", in {split}") + variant


def _over_others(
    case: str, model: Model, devices: int, found: Mapping[int, Rates], asked: PipelineOptions, variant: str
) -> list[Figure]:
    """Tokens a second of tensor parallelism and of FSDP, and LoRAPP's over them, by number of jobs."""
    figures = []
    for other, rate in _whole_model_rates(model, devices, asked).items():
        figures.append(Figure(f"{case}: {other}{variant}", rate, "tokens/s", "simulated"))
        for split in asked.splits:
            beside = _beside(split, asked, variant)
            for count, each in found.items():
                own, gain = each.over(rate), each.lorapp[split] / rate
                note = f"{each.lorapp[split]:,.0f} over {rate:,.0f} tokens/s"
                over, saved = (f"{case}, {count} jobs: {what} over {other}{beside}" for what in OVER)
                figures += [
                    Figure(over, gain, "×", "simulated", note=note, plait=own),
                    Figure(saved, _saved(gain), "%", "simulated", plait=_saved(own)),
                ]
    return figures


@overload
def _saved(faster: float) -> float: ...
@overload
def _saved(faster: float | None) -> float | None: ...
def _saved(faster: float | None) -> float | None:
    """The share of time that a system saves that is so many times as fast, in percent."""
    return None if faster is None else 100 * (1 - 1 / faster)


def _whole_model_rates(model: Model, devices: int, asked: PipelineOptions) -> dict[str, float]:
    """Tokens a second of systems that train one job on all devices, whose links are ``gigabytes_per_s``.

    Tensor parallelism has the whole head and loss on every device. Its products wait for sums, but PyTorch's
    backward sums up gradients while it computes others. FSDP divides the batch among devices. It gathers all
    weights, of as many bytes a value as activations, for the forward and for the backward: the next layer's
    while one runs, or late. mLoRA's artifact has each adapter gathered by itself, and PyTorch's backward asks
    for one such unit ahead, so a whole layer comes late.
    """
    bandwidth = 1e9 * (asked.gigabytes_per_s or float("inf"))
    head, loss = asked.head(model), asked.loss(model) * asked.tokens
    sliced = (model.layers * asked.layer(model, model.sliced, devices) + head) * asked.tokens
    one = tensor_parallel_bytes(model, devices, asked) / PASSES / devices / bandwidth
    beside = max(sliced * asked.backward, BACKWARD_PASSES * one)
    forward = (model.layers * asked.layer(model, model.peft) + head) * asked.tokens / devices
    backward, weights = forward * asked.backward, model.weights + 2 * model.head
    gathered = weights * asked.value_bytes * (devices - 1) / devices / bandwidth
    ahead, own_loss = max(forward, gathered), loss / devices
    return {
        "TP": asked.tokens / (loss + sliced + FORWARD_PASSES * one + beside),
        "TP, Megatron-LM's sums": asked.tokens / (loss + sliced * (1 + asked.backward) + PASSES * one),
        "FSDP": asked.tokens / (own_loss + ahead + backward + gathered),
        "FSDP, weights in time": asked.tokens / (own_loss + ahead + max(backward, gathered)),
        "FSDP, weights late": asked.tokens / (own_loss + forward + backward + 2 * gathered),
    }


def _scaling(
    name: str, found: Mapping[int, Mapping[int, Rates]], asked: PipelineOptions, variant: str
) -> list[Figure]:
    """Tokens a second by devices, over LoRAPP's on the fewest, with as many jobs as are first in ``jobs``."""
    figures = []
    first, *others = found
    base = next(iter(found[first].values()))
    for split in asked.splits if others else ():
        for devices in others:
            each, rate = next(iter(found[devices].values())), base.lorapp[split]
            case = f"{name}: tokens/s of {devices} devices over {first}{_beside(split, asked, variant)}"
            figures.append(Figure(case, each.lorapp[split] / rate, "×", "simulated", plait=each.over(rate)))
    return figures


@benchmark("mlora/communication", PipelineOptions)
def communication(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: PipelineOptions) -> Report:
    """Bytes that a step sends in a pipeline, as the simulator counts them, and in tensor parallelism."""
    figures = []
    for name, model in asked.models.items():
        for devices in asked.devices:
            seconds = [[each] for each in asked.stages(model, devices, 1)]
            work = Work((("job", 0),), tokens=asked.tokens)
            metrics, _ = measure({0: Pipeline([work], seconds, OneFOneB([1]))}, hidden_size=model.hidden)
            sent = metrics.communication_bytes / 2**20
            reduced = tensor_parallel_bytes(model, devices, asked) / 2**20
            case = f"{name}, {devices} devices"
            figures += [
                Figure(f"{case}: LoRAPP and 1F1B", sent, "MiB", "computed"),
                Figure(f"{case}: tensor parallelism", reduced, "MiB", "computed"),
                Figure(f"{case}: tensor parallelism over LoRAPP", reduced / sent, "×", "computed"),
            ]
    return Report("mLoRA, bytes of a step between devices", tuple(figures), ("16-bit activations.",))


def tensor_parallel_bytes(model: Model, devices: int, asked: PipelineOptions) -> float:
    """Two all-reduces a layer forward and two backward, each of 2(t − 1)/t times the activations."""
    return PASSES * model.layers * (devices - 1) * asked.tokens * model.hidden * asked.value_bytes

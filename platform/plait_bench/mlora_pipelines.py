"""mLoRA's pipelines in the simulator: tokens a second by jobs, devices and links, and bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from plait.config.fields import build
from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.plans import GlobalBatch
from plait.core.settings import RunSettings
from plait.cost.time import StageTime
from plait.planner.packing_exact import GREEDY
from plait.simulate.events import OneFOneB, Order, Pipeline, Run, Work, simulate
from plait.simulate.orders import BackwardFirst, arrange
from plait.simulate.report import measure
from plait_bench.benchmarks import BENCHMARKS
from plait_bench.figures import Figure, Report
from plait_bench.inputs import OPTIONS, above_zero, at_least_one

TURNS = 24  # simulated steps of each job
OVER = ("LoRAPP", "time saved")  # over other systems: of its tokens a second, and of seconds
WEIGHT_PASSES = 2.0  # operations of one weight on one token


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a base model: weights of its linears, features and decoder layers.

    Attributes:
        vocabulary: words of the head; 0: head, embedding and whole layers are left out.
        moved: megabytes that a token's operators between products move in a layer, forward and backward.
        sliced: those on each device of tensor parallelism.
    """

    weights: float
    hidden: int
    layers: int
    vocabulary: int = 0
    moved: float = 0.0
    sliced: float = 0.0

    def __post_init__(self) -> None:
        at_least_one(self, "hidden", "layers")

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
class PipelineOptions:
    """Options of the benchmarks of mLoRA's pipelines.

    Attributes:
        models: by name.
        devices: stages; each number is simulated.
        jobs: trained at once; each number is simulated, null for as many as there are stages.
        tokens: of a global batch.
        length: tokens of a sample, for attention's products; 0 leaves them out.
        splits: microbatches into which 1F1B splits a global batch; the first is what is compared.
        teraflops: of a device, which is assumed: with messages it decides what dominates.
        memory_gigabytes_per_s: of a device; null leaves out the operators between products.
        backward: seconds of a backward over those of a forward.
        gigabytes_per_s: between neighbours; null for messages that take no time.
        crossings: times that a message crosses such a link: 2 through the host.
        logits: whether the last stage sends its logits to the first device, which computes the loss, as
            mLoRA's artifact does; a loss on the last device, as its text says, is simulated beside it.
        without_logits: teraflops and gigabytes_per_s that are used there, if they are fitted; null: the same.
        value_bytes: of an activation.
        spare: jobs more than stages where devices are compared; the first is what is compared.
        beside_others: whether LoRAPP stands beside tensor parallelism and FSDP, too.
    """

    models: dict[str, Model]
    devices: tuple[int, ...]
    jobs: tuple[int | None, ...]
    tokens: int = 4096
    length: int = 0
    splits: tuple[int, ...] = (8,)
    teraflops: float = 50.0
    memory_gigabytes_per_s: float | None = None
    backward: float = 1.0
    gigabytes_per_s: float | None = None
    crossings: int = 1
    logits: bool = False
    without_logits: tuple[float, float] | None = None
    value_bytes: int = 4
    spare: tuple[int, ...] = (0,)
    beside_others: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, "tokens", "value_bytes", "crossings")
        for name in ("devices", "splits"):
            if min(getattr(self, name), default=0) < 1:
                raise ConfigError(
                    f"{OPTIONS}.{name}={getattr(self, name)}", "There must be one, of at least 1."
                )
        speeds = ("gigabytes_per_s", "memory_gigabytes_per_s")
        given = [name for name in speeds if getattr(self, name) is not None]
        above_zero(self, "teraflops", "backward", *given)

    def layer(self, model: Model, slices: int = 1) -> float:
        """Seconds of a token's forward in a layer, on one of ``slices`` devices that share it."""
        weights = WEIGHT_PASSES * model.weights / model.layers
        products = (weights + 2 * WEIGHT_PASSES * model.hidden * self.length) / (self.teraflops * 1e12)
        moved = 1e6 * (model.moved if slices == 1 else model.sliced)
        between = moved / 2 / (1e9 * (self.memory_gigabytes_per_s or float("inf")))
        return products / slices + between

    def head(self, model: Model) -> float:
        """Seconds of a token's forward in the head."""
        return WEIGHT_PASSES * model.head / (self.teraflops * 1e12)

    def stages(self, model: Model, devices: int, split: int) -> list[StageTime]:
        """Seconds of each stage for one microbatch."""
        found = []
        for stage, layers in enumerate(model.shares(devices)):
            token = layers * self.layer(model) + (self.head(model) if stage == devices - 1 else 0.0)
            forward = token * self.tokens / split
            found.append(StageTime(forward, forward * self.backward))
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
        lorapp: of mLoRA's pipeline: jobs in turn, each batch whole.
        alone: of 1F1B by split, one job after another.
        plait: of Plait's schedule, its batches split as is best for it; None beside another assumption.
    """

    lorapp: float
    alone: Mapping[int, float]
    plait: float | None

    def over(self, rate: float) -> float | None:
        """Plait's over another rate."""
        return None if self.plait is None else self.plait / rate


def rates(model: Model, devices: int, jobs: int, asked: PipelineOptions, *, compared: bool = True) -> Rates:
    """Both systems' steady tokens a second, and Plait's of what is ``compared``."""
    lorapp, alone = lorapp_rate(model, devices, jobs, asked), {}
    for split in asked.splits:
        batch = [Work((("job", 0),)) for _ in range(split)]
        one = simulate({0: _pipeline(batch, model, devices, split, OneFOneB([split]), asked)})
        alone[split] = asked.tokens / one.makespan
    splits = {1, *asked.splits} if compared else ()
    own = max((_plaits(model, devices, jobs, split, asked) for split in splits), default=None)
    return Rates(lorapp, alone, own)


def lorapp_rate(model: Model, devices: int, jobs: int, asked: PipelineOptions) -> float:
    """Steady tokens a second of mLoRA's pipeline."""
    works = [Work(((f"job{job}", turn),)) for turn in range(TURNS) for job in range(jobs)]
    return _steady(simulate({0: _pipeline(works, model, devices, 1, BackwardFirst(), asked)}), jobs, asked)


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
    return _steady(simulate({0: Pipeline(works, seconds, found.order, sent)}), jobs, asked)


def _pipeline(
    works: Sequence[Work], model: Model, devices: int, split: int, order: Order, asked: PipelineOptions
) -> Pipeline:
    """mLoRA's pipeline, whose logits go to the first device as to one more stage."""
    seconds = [[each] * len(works) for each in asked.stages(model, devices, split)]
    message, sizes = asked.message(model, split), [1.0] * (devices - 1)
    if asked.logits:
        seconds.append([StageTime(0.0, 0.0)] * len(works))
        sizes.append(model.vocabulary / model.hidden)
    return Pipeline(works, seconds, order, [message] * len(works) if message else (), sizes)


@BENCHMARKS.register("mlora/pipelines")
def pipelines(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Time of a task saved over 1F1B, and tokens a second by jobs and devices.

    Raises:
        ConfigError: a wrong option.
    """
    del settings, jobs
    asked = build(PipelineOptions, options, OPTIONS)
    figures: list[Figure] = []
    for name, model in asked.models.items():
        for devices in asked.devices:
            counts = [each or devices for each in asked.jobs]
            case = f"{name}, {devices} devices"
            for loss, at in _losses(asked):
                found = {count: rates(model, devices, count, at, compared=not loss) for count in counts}
                figures += _case(case, found, at, loss)
                if asked.beside_others:
                    figures += _over_others(case, model, devices, found, at, loss)
        figures += _scaling(name, model, asked)
    assumed = f"{asked.teraflops:g} TFLOP/s a device, backward {asked.backward:g} times as long as forward"
    link = "take no time" if asked.gigabytes_per_s is None else f"at {asked.gigabytes_per_s:g} GB/s"
    return Report("mLoRA's pipelines", tuple(figures), (f"Assumed: {assumed}; messages {link}.",))


def _losses(asked: PipelineOptions) -> list[tuple[str, PipelineOptions]]:
    """Where the loss is computed, with what figures add to their names: first what is compared."""
    cases = [("", asked)]
    if asked.logits:
        teraflops, link = asked.without_logits or (asked.teraflops, asked.gigabytes_per_s)
        last = replace(asked, logits=False, teraflops=teraflops, gigabytes_per_s=link)
        cases.append((", loss on the last device", last))
    return cases


def _case(case: str, found: Mapping[int, Rates], asked: PipelineOptions, loss: str) -> list[Figure]:
    figures = []
    for count, each in found.items():
        label = f"{case}, {count} jobs"
        for number, split in enumerate(asked.splits):
            saved, ours = _saved(each.lorapp / each.alone[split]), _saved(each.over(each.alone[split]))
            beside = "" if number == 0 else f", 1F1B in {split}"
            note = f"LoRAPP {each.lorapp:,.0f}, 1F1B in {split} {each.alone[split]:,.0f} tokens/s"
            name = f"{label}: time saved{beside}{loss}"
            figures.append(Figure(name, saved, "%", "simulated", note=note, plait=ours))
        first = found[min(found)]
        gain, own = each.lorapp / first.lorapp, each.over(first.lorapp)
        name = f"{label}: LoRAPP{loss}"
        figures.append(Figure(name, each.lorapp, "tokens/s", "simulated", plait=each.plait))
        if len(found) > 1:
            name = f"{label}: tokens/s over {min(found)} jobs{loss}"
            figures.append(Figure(name, gain, "×", "simulated", plait=own))
    return figures


def _over_others(
    case: str, model: Model, devices: int, found: Mapping[int, Rates], asked: PipelineOptions, loss: str
) -> list[Figure]:
    """LoRAPP's tokens a second over those of tensor parallelism and of FSDP, by number of jobs."""
    figures = []
    for other, rate in _whole_model_rates(model, devices, asked).items():
        for count, each in found.items():
            note, own = f"{each.lorapp:,.0f} over {rate:,.0f} tokens/s", each.over(rate)
            over, saved = (f"{case}, {count} jobs: {what} over {other}{loss}" for what in OVER)
            figures += [
                Figure(over, each.lorapp / rate, "×", "simulated", note=note, plait=own),
                Figure(saved, _saved(each.lorapp / rate), "%", "simulated", plait=_saved(own)),
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

    Tensor parallelism adds up activations four times a layer, between products that wait for them, and has
    the whole head on every device. FSDP trains a batch on each device. It gathers all weights, of as many
    bytes a value as activations, for the forward and for the backward; the next layer's while one runs, or
    late.
    """
    bandwidth, passes = 1e9 * (asked.gigabytes_per_s or float("inf")), 1 + asked.backward
    head = asked.head(model)
    sliced = (model.layers * asked.layer(model, devices) + head) * asked.tokens * passes
    summed = tensor_parallel_bytes(model, devices, asked) / devices / bandwidth
    forward = (model.layers * asked.layer(model) + head) * asked.tokens
    backward, weights = forward * asked.backward, model.weights + 2 * model.head
    gathered = weights * asked.value_bytes * (devices - 1) / devices / bandwidth
    in_time = max(forward, gathered) + max(backward, gathered)
    return {
        "TP": asked.tokens / (sliced + summed),
        "FSDP": devices * asked.tokens / in_time,
        "FSDP, weights late": devices * asked.tokens / (forward + backward + 2 * gathered),
    }


def _scaling(name: str, model: Model, asked: PipelineOptions) -> list[Figure]:
    """Tokens a second by devices, over LoRAPP's on the fewest."""
    figures = []
    for number, spare in enumerate(asked.spare if len(asked.devices) > 1 else ()):
        first, *others = asked.devices
        base = lorapp_rate(model, first, first + spare, asked)
        label = "" if number == 0 else f", {spare} jobs more"
        for devices in others:
            found = rates(model, devices, devices + spare, asked)
            case = f"{name}: tokens/s of {devices} devices over {first}{label}"
            figures.append(Figure(case, found.lorapp / base, "×", "simulated", plait=found.over(base)))
    return figures


@BENCHMARKS.register("mlora/communication")
def communication(settings: RunSettings, jobs: Sequence[JobSpec], options: Mapping[str, object]) -> Report:
    """Bytes that a step sends in a pipeline, as the simulator counts them, and in tensor parallelism.

    Raises:
        ConfigError: a wrong option.
    """
    del settings, jobs
    asked = build(PipelineOptions, options, OPTIONS)
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
    reduces, ring = 4 * model.layers, 2 * (devices - 1)
    return reduces * ring * asked.tokens * model.hidden * asked.value_bytes

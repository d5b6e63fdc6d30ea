"""mLoRA's BatchLoRA on this machine: seconds by jobs beside PEFT, launches, and pruning of the graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from plait.core.errors import ConfigError
from plait.core.jobs import JobSpec
from plait.core.messages import StepJob
from plait.core.plans import Microbatch
from plait.core.settings import RunSettings
from plait.cost.fake_memory import fake_context, fake_model, observe_extrapolated
from plait.cost.probes import Probe, ProbeOptions, ProbeSegment, probe_bank, probe_loss, probe_routing
from plait.cost.time import MicrobatchShape, TimeModel
from plait.models.quiet import quiet
from plait_bench.benchmarks import OPTIONS, benchmark
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.inputs import Count, Counts, require_processor
from plait_bench.joint_side import JointSide, load_joint_side
from plait_bench.peft_baseline import PeftBaseline
from plait_bench.processor_time import fitted_time, timed
from plait_bench.progress import part
from plait_kernels.counting import counted

CAPACITIES = (256, 512, 1024)  # tokens of the microbatches from which the simulation is made
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
BACKENDS = ("reference", "grouped")  # of the adapters' part: as plain operators, and pruned


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of ``mlora/batch_lora``.

    Attributes:
        counts: numbers of jobs that train together.
        rounds: of measurements, which take turns.
    """

    counts: Counts
    rounds: Count = 2


@benchmark("mlora/batch_lora", BatchOptions)
def batch_lora(settings: RunSettings, jobs: Sequence[JobSpec], asked: BatchOptions) -> Report:
    """Processor seconds of a step and job by the number of jobs that train together, and with PEFT.

    Raises:
        ConfigError: fewer jobs than one asks for, or another device than the processor.
    """
    require_processor(settings)
    if max(asked.counts) > len(jobs):
        raise ConfigError(f"{OPTIONS}.counts={list(asked.counts)}", f"The search has {len(jobs)} jobs.")
    jobs = jobs[: max(asked.counts)]
    side, baseline = load_joint_side(settings, jobs), PeftBaseline.load(settings)
    side.warm_up(jobs[0])
    baseline.warm_up(jobs[0], side.split(jobs[0]))
    times = _simulation(side, jobs)
    joint: dict[int, list[float]] = {count: [] for count in asked.counts}
    alone: list[list[float]] = []
    piece = part("joint steps and PEFT's, in turns", asked.rounds)
    for number in range(asked.rounds):
        piece(f"round {number + 1}")
        for count in asked.counts:
            joint[count].append(_joint(side, jobs[:count]))
        alone.append([_alone(baseline, side, job) for job in jobs])
    figures = []
    for count in asked.counts:
        took, peft = median(joint[count]) / count, median(sum(each[:count]) for each in alone) / count
        said = _simulated(side, jobs[:count], times) / count
        name = f"{count} job{'s' * (count > 1)}"
        expected = Baseline(said, "simulated")
        figures.append(Figure(f"{name}: a step and job", took, "s", "measured", expected))
        note = f"PEFT {peft:.3g} s a step and job"
        figures.append(
            Figure(f"{name}: time saved over PEFT", 100 * (1 - took / peft), "%", "measured", note=note)
        )
    notes = (f"Processor seconds, {settings.model.kind}, batches of {jobs[0].train.batch_size}.",)
    return Report("BatchLoRA on this machine", tuple(figures), notes)


def _packed(side: JointSide, jobs: Sequence[JobSpec]) -> tuple[Microbatch, ...]:
    return side.pack(jobs, 1, side.settings.engine.capacity_or_usual)


def _joint(side: JointSide, jobs: Sequence[JobSpec]) -> float:
    """Processor seconds of a joint step."""
    steps = [StepJob(job.name, 1, job.train.lr) for job in jobs]
    with side.attached(jobs):
        return timed(side.worker, _packed(side, jobs)) + timed(side.worker, steps)


def _alone(baseline: PeftBaseline, side: JointSide, job: JobSpec) -> float:
    """Processor seconds of PEFT's step."""
    with baseline.training(job, side.split(job), None) as training:
        began = time.process_time()
        training.step()
        return time.process_time() - began


def _simulation(side: JointSide, jobs: Sequence[JobSpec]) -> tuple[TimeModel, float]:
    """The time model of microbatches of the first job, and seconds of its optimiser step."""
    job = jobs[0]
    longest = max(side.batch(job, 1).lengths)
    probes = [
        each
        for capacity in CAPACITIES
        for step in (1, 2)
        for each in side.pack([job], step, max(capacity, longest))
    ]
    with side.attached([job]):
        model = fitted_time(side.worker, probes, lambda each: _shape(side, [job], each))
        return model, timed(side.worker, [StepJob(job.name, 1, job.train.lr)])


def _simulated(side: JointSide, jobs: Sequence[JobSpec], times: tuple[TimeModel, float]) -> float:
    model, step = times
    return sum(model.microbatch(_shape(side, jobs, each)) for each in _packed(side, jobs)) + len(jobs) * step


def _shape(side: JointSide, jobs: Sequence[JobSpec], microbatch: Microbatch) -> MicrobatchShape:
    splits = {job.name: side.split(job) for job in jobs}
    segments = microbatch.segments
    labelled = sum(int(splits[each.job][at].labels.sum()) for each in segments for at in each.samples)
    return MicrobatchShape.of([length for each in segments for length in each.lengths], labelled=labelled)


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options of ``mlora/launches`` and ``mlora/graph_pruning``.

    Attributes:
        shapes: sizes of a LlamaConfig by name; no weights are needed.
        counts: numbers of adapters, one sample batch each.
        samples: of a job's batch.
        length: tokens of a sample.
        rank: of an adapter.
        launch_us: microseconds of a launch; the first is what is compared.
        teraflops: of the device, which is assumed.
    """

    shapes: dict[str, dict[str, Any]]
    counts: Counts = (1, 2, 4)
    samples: Count = 8
    length: Count = 512
    rank: Count = 16
    launch_us: tuple[float, ...] = (5.0,)
    teraflops: float = 50.0

    def probe(self, count: int) -> Probe:
        """The microbatch of ``count`` jobs."""
        segment = ProbeSegment(self.rank, (self.length,) * self.samples)
        return Probe((segment,) * count, count * self.samples * self.length)


@benchmark("mlora/launches", GraphOptions)
def launches(_settings: RunSettings, _jobs: Sequence[JobSpec], asked: GraphOptions) -> Report:
    """Launches of a step and job, counted on meta tensors: PEFT's, and Plait's by the number of jobs."""
    figures = []
    piece = part("models", len(asked.shapes))
    for name, sizes in asked.shapes.items():
        piece(name)
        config = LlamaConfig(**sizes)
        alone = _peft_launches(config, asked)
        figures.append(Figure(f"{name}: PEFT, launches of a step", alone, "", "computed"))
        for count in asked.counts:
            own = _joint_launches(config, asked.probe(count)) / count
            note = f"{alone / own:.2f} times fewer than PEFT's"
            figures.append(
                Figure(f"{name}, {count} jobs: launches of a step and job", own, "", "computed", note=note)
            )
        for number, each in enumerate(asked.launch_us):
            share = 100 / (1 + _compute_seconds(config, asked) / (alone * each * 1e-6))
            other = f"; {each:g} µs" if number else ""
            figures.append(Figure(f"{name}: launches in PEFT's step{other}", share, "%", "computed"))
    notes = (f"An operator is one launch of {asked.launch_us[0]:g} µs; {asked.teraflops:g} TFLOP/s.",)
    return Report("mLoRA, launches", tuple(figures), notes)


def _compute_seconds(config: LlamaConfig, asked: GraphOptions) -> float:
    """Seconds of the products of a step: the frozen weights take 2 operations forward and 2 backward."""
    h, i = config.hidden_size, config.intermediate_size
    shared = (config.num_key_value_heads or config.num_attention_heads) / config.num_attention_heads
    weights = config.num_hidden_layers * h * (2 * h * (1 + shared) + 3 * i) + h * config.vocab_size
    return float(4 * weights * asked.samples * asked.length / (asked.teraflops * 1e12))


def _peft_launches(config: LlamaConfig, asked: GraphOptions) -> int:
    """Launches of forward and backward of transformers with PEFT."""
    loader = cast(Any, AutoModelForCausalLM)
    with torch.device("meta"), quiet():
        plain = loader.from_config(config, attn_implementation="sdpa").to(torch.bfloat16)
        lora = LoraConfig(
            r=asked.rank, lora_dropout=0.05, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )
        model = get_peft_model(plain, lora).train()
        ids = torch.zeros(asked.samples, asked.length, dtype=torch.int64)
        with counted() as counts:
            torch.autograd.backward(cast(Tensor, model(input_ids=ids, labels=ids, use_cache=False).loss))
    return counts.launches


def _joint_launches(config: LlamaConfig, probe: Probe) -> int:
    options = ProbeOptions(targets=TARGETS, backend="triton")
    model = fake_model(config, layers=config.num_hidden_layers, dtype=options.dtype)
    bank = probe_bank(model, probe, options)
    routing = probe_routing(probe, bank)
    context = fake_context(config, probe.lengths, routing, checkpointing=False, dtype=options.dtype)
    with counted() as counts:
        torch.autograd.backward(probe_loss(model, probe, model.hidden(context)))
    return counts.launches


@benchmark("mlora/graph_pruning", GraphOptions)
def graph_pruning(settings: RunSettings, jobs: Sequence[JobSpec], asked: GraphOptions) -> Report:
    """What fused adapters save over plain operators: peak bytes, computed, and seconds of a step, measured.

    Raises:
        ConfigError: another device than the processor.
    """
    require_processor(settings)
    figures = []
    for name, sizes in asked.shapes.items():
        config = LlamaConfig(**sizes)
        for count in asked.counts:
            plain, pruned = (
                observe_extrapolated(
                    config, [asked.probe(count)], ProbeOptions(targets=TARGETS, backend=each)
                )[0]
                for each in BACKENDS
            )
            saved = 100 * (plain.dynamic - pruned.dynamic) / (plain.dynamic + plain.static)
            note = f"of {(plain.dynamic + plain.static) / 2**30:.1f} GiB"
            figures.append(Figure(f"{name}, {count} adapters: peak saved", saved, "%", "computed", note=note))
    side, jobs = load_joint_side(settings, jobs), jobs[: max(asked.counts)]
    side.warm_up(jobs[0])
    taken: dict[str, list[float]] = {each: [] for each in BACKENDS}
    for number in range(3):
        for backend in BACKENDS[:: 1 if number % 2 else -1]:
            with side.kernels(backend):
                taken[backend].append(_joint(side, jobs))
    plain_seconds, pruned_seconds = (min(taken[each]) for each in BACKENDS)
    saved = 100 * (1 - pruned_seconds / plain_seconds)
    note = f"{pruned_seconds:.2f} over {plain_seconds:.2f} processor seconds, {settings.model.kind}"
    figures.append(Figure(f"{len(jobs)} adapters: time of a step saved", saved, "%", "measured", note=note))
    return Report("Fused adapters compared with plain operators", tuple(figures))

"""LoRAFusion's workload without its kernels: what schedules add, padding, capacities and scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from plait.core.jobs import JobSpec
from plait.core.plans import Replica
from plait.core.settings import RunSettings
from plait.planner.packing_exact import pack_all
from plait.planner.schedule import turns
from plait.simulate.events import Pipeline, Work
from plait.simulate.forecast import Machine, PlanOptions, make_plan, plan_pipelines
from plait.simulate.report import measure
from plait_bench.benchmarks import benchmark
from plait_bench.blocking import blocking_seconds
from plait_bench.figures import Baseline, Figure, Report
from plait_bench.lorafusion import (
    Alternative,
    Lengths,
    Opening,
    Options,
    balanced,
    groups_of,
    lorafusion,
    moved,
    opened,
    plaits_order,
    planned,
)
from plait_bench.lorafusion_order import ordered
from plait_bench.lorafusion_runs import rate_in_runs
from plait_bench.pipelines import (
    global_batches,
    in_data_order,
    lorapp,
    one_after_another,
    sharded_rate,
)
from plait_bench.progress import part

LEAST = 0.95  # tokens a second at LoRAFusion's capacity over those at the best one, if both agree


@benchmark("lorafusion/breakdown", Options)
def breakdown(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Tokens a second over 1F1B's: jobs in turn, balanced microbatches, and Plait's plan.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    figures = list[Figure]()
    for padded, how in ((False, ""), (True, ", samples padded to the longest")):
        base, turn, fused, own = map(rate_in_runs, pipelines_of(begun, begun.trace, padded=padded))
        rates = {"jobs in turn": (turn, own), "balanced, several adapters a microbatch": (fused, own)}
        if not padded:
            rates["balanced"] = (_apart(begun), own)
            rates |= {_with_kernels(each, asked): (each * fused, each * own) for each in asked.kernels}
        figures += [
            Figure(f"{name}{how}", each / base, "× 1F1B", "simulated", plait=plait / base)
            for name, (each, plait) in rates.items()
        ]
    return Report("LoRAFusion, what schedules add", tuple(figures), asked.assumptions())


def _with_kernels(factor: float, asked: Options) -> str:
    label = "" if factor == asked.kernels[0] else f"; × {factor:g}"
    return f"balanced, with its kernels{label}"


def _apart(begun: Opening) -> float:
    """Tokens a second of LoRAFusion's schedule if no microbatch holds samples of two adapters."""
    asked = begun.asked
    order = list(turns(global_batches(begun.trace), tuple((job,) for job in begun.trace)))
    packed = pack_all(order, capacity=asked.capacity, tile=asked.tile)
    return rate_in_runs(ordered(packed, begun.even, capacity=asked.capacity, tile=asked.tile, merging=False))


def pipelines_of(begun: Opening, trace: Lengths, *, padded: bool = False) -> tuple[Pipeline, ...]:
    """1F1B, mLoRA in that order, LoRAFusion and Plait."""
    even, asked = begun.even, begun.asked
    works = lorapp(trace, even, size=asked.samples, padded=padded).works
    return (
        one_after_another(trace, even, size=asked.samples, padded=padded, gpipe=False),
        even.in_order(works),
        lorafusion(trace, even, asked),
        planned(trace, begun.profile, asked),
    )


@benchmark("lorafusion/end_to_end", Options)
def end_to_end(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Tokens a second of LoRAFusion, of the systems that it is compared with, and of Plait, by workload.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    figures = list[Figure]()
    ratios = defaultdict[str, list[tuple[float, float]]](list)
    piece = part("workloads", len(asked.capacities))
    for name, capacity in asked.capacities.items():
        piece(name)
        trace, at = asked.workload(name), replace(asked, capacity=capacity)
        fused = rate_in_runs(lorafusion(trace, begun.even, at))
        own = rate_in_runs(planned(trace, begun.profile, at))
        others = _others(begun, name, trace)
        for other, rate in others.items():
            ratios[other].append((fused / rate, own / rate))
        figures += [_speed(f"{name}: {other}", rate) for other, rate in others.items()]
        figures += [
            replace(_speed(f"{name}: LoRAFusion{_factor(asked, each)}", each * fused), plait=own)
            for each in asked.kernels
        ]
        for under in asked.alternatives:
            rates = _all_under(begun, under, name, capacity)
            figures += [_speed(f"{name}: {system}; {under.label}", rate) for system, rate in rates.items()]
    for factor in asked.kernels:
        for other, found in ratios.items():
            for how, of in (("mean", mean), ("largest", max)):
                ours, own = (factor * of(each) for each in zip(*found, strict=True))
                title = f"over {other}, {how}{_factor(asked, factor)}"
                figures.append(Figure(title, ours, "×", "simulated", plait=own))
    notes = (
        *asked.assumptions(),
        f"LoRAFusion's kernels: a factor of {asked.kernels[0]:g}, by its Figure 22.",
    )
    return Report("LoRAFusion, tokens a second of four adapters", tuple(figures), notes)


def _speed(name: str, rate: float) -> Figure:
    return Figure(name, rate, "tokens/s", "simulated")


def _factor(asked: Options, factor: float) -> str:
    """The end of a figure's name, where the factor of the kernels is not the first."""
    return "" if factor == asked.kernels[0] else f"; kernels × {factor:g}"


def _all_under(begun: Opening, under: Alternative, name: str, capacity: int) -> dict[str, float]:
    """Tokens a second of all systems on a workload under another assumption."""
    other, trace = moved(begun, under), begun.asked.workload(name, under)
    at = replace(other.asked, capacity=under.capacity or capacity)
    own = (plaits_order if under.plaits else lorafusion)(trace, other.even, at)
    return _others(other, name, trace) | {"LoRAFusion": other.asked.kernels[0] * rate_in_runs(own)}


def _others(begun: Opening, name: str, trace: Lengths) -> dict[str, float]:
    """Tokens a second of the systems that LoRAFusion is compared with, none of which packs, on a workload."""
    asked, even = begun.asked, begun.even
    size = {
        system: asked.sizes.get(system, {}).get(name, asked.samples) for system in ("1F1B", "mLoRA", "FSDP")
    }
    turns = lorapp(trace, even, size=size["mLoRA"], padded=False).works
    apart = one_after_another(trace, even, size=size["1F1B"], padded=False, gpipe=False)
    found = {"1F1B": rate_in_runs(apart), "mLoRA": rate_in_runs(even.in_order(turns))}
    for system, gather in (("FSDP", asked.gather), ("FSDP, weights in time", 0.0)):
        found[system] = sharded_rate(
            trace, begun.profile.time, devices=asked.stages, size=size["FSDP"], gather=gather
        )
    return found


@benchmark("lorafusion/profiler", Options)
def profiler(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Tokens a second at LoRAFusion's capacity over those at the best of the tried ones, by workload.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    figures = []
    piece = part("workloads", len(asked.capacities))
    for name, theirs in asked.capacities.items():
        piece(name)
        trace = asked.workload(name)
        rates = {
            capacity: rate_in_runs(lorafusion(trace, begun.even, replace(asked, capacity=capacity)))
            for capacity in sorted({*asked.tried, theirs})
        }
        best = max(rates, key=lambda each: rates[each])
        beside = Baseline(1.0, "the best capacity that was tried", at_least=LEAST)
        note = f"{theirs} tokens; {best} are best, {rates[best]:,.0f} tokens/s"
        figures.append(Figure(name, rates[theirs] / rates[best], "×", "simulated", beside, note))
    return Report("LoRAFusion's capacities compared with the best", tuple(figures), asked.assumptions())


@benchmark("lorafusion/scaling", Options)
def scaling(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Tokens a second of more jobs over those of data parallelism, by system and number of pipelines.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    copies = {"LoRAFusion": _lorafusion_copies, "mLoRA": _mlora_copies, "1F1B": _drained, "FSDP": _gathered}
    one = {name: each(begun, 1) for name, each in copies.items()}
    one["1F1B"] = _drained(
        begun, 1, times=2
    )  # its jobs have twice the global batch there, also on 16 devices
    own, figures = _plait_copies(begun, 1), list[Figure]()
    piece, shared = part("pipelines", len(asked.replicas)), list[dict[str, tuple[float, float]]]()
    for number in asked.replicas:
        piece(str(number))
        shared.append({name: each(begun, number) for name, each in copies.items()})
        over = {name: _over(number, one[name], each) for name, each in shared[-1].items()}
        over["mean of systems"] = tuple(map(mean, zip(*over.values(), strict=True)))
        plait = _over(number, own, _plait_copies(begun, number))
        for name, ratios in over.items():
            title = f"{number * asked.stages} devices: {name}, jobs over data parallelism"
            for at, how in enumerate(("; without waits", "")):
                plan = plait[at] if name == "LoRAFusion" else None
                figures.append(Figure(f"{title}{how}", ratios[at], "×", "simulated", plait=plan))
    figures += _over_others(asked, shared)
    return Report("LoRAFusion, ways to use more devices", tuple(figures), asked.assumptions())


def _over_others(asked: Options, shared: Sequence[Mapping[str, tuple[float, float]]]) -> list[Figure]:
    """LoRAFusion's tokens a second over each other system's with data parallelism, in the mean over numbers
    of pipelines: with its kernels' factor and waits, and under the other assumptions."""
    figures = []
    for other in ("FSDP", "mLoRA", "1F1B"):
        ratios = [mean(each["LoRAFusion"][at] / each[other][at] for each in shared) for at in (0, 1)]
        name = f"data parallelism: LoRAFusion over {other}, mean"
        figures += [
            Figure(f"{name}{_factor(asked, factor)}{how}", factor * ratio, "×", "simulated")
            for factor in asked.kernels
            for ratio, how in zip(ratios, ("; without waits", ""), strict=True)
        ]
    return figures


def _over(number: int, one: Sequence[float], shared: Sequence[float]) -> tuple[float, ...]:
    """Tokens a second of ``number`` times as many jobs over those of as many pipelines that share a job."""
    return tuple(number * alone / rate for alone, rate in zip(one, shared, strict=True))


def _larger(asked: Options, number: int) -> Lengths:
    """Lengths in global batches that are ``number`` times as large."""
    return replace(asked, global_batch=number * asked.global_batch).drawn()


def _lorafusion_copies(begun: Opening, number: int) -> tuple[float, float]:
    """Tokens a second of LoRAFusion's schedule on ``number`` pipelines, as of :func:`_shared`."""
    trace, depth = _larger(begun.asked, number), number * begun.asked.stages
    groups = {job: group[0] for group in groups_of(trace, begun.asked, depth) for job in group}
    works = lorafusion(trace, begun.even, begun.asked, stages=depth).works
    return _shared(works, begun.even, number, groups)


def _mlora_copies(begun: Opening, number: int) -> tuple[float, float]:
    """Tokens a second of mLoRA's order on ``number`` pipelines, as of :func:`_shared`."""
    trace = _larger(begun.asked, number)
    works = lorapp(trace, begun.even, size=begun.asked.samples, padded=False).works
    return _shared(works, begun.even, number, {job: job for job in trace})


def _shared(works: Sequence[Work], even: Machine, number: int, groups: dict[str, str]) -> tuple[float, float]:
    """Tokens a second of ``number`` pipelines that take microbatches in turn, as in LoRAFusion's artifact: as
    simulated, and if each stage waits for the same stage of the others after each step."""
    pipelines = {each: even.in_order(works[each::number]) for each in range(number)}
    return _both(pipelines, groups)


def _drained(begun: Opening, number: int, times: int | None = None) -> tuple[float, float]:
    """Tokens a second of 1F1B's jobs one after another, drained after each global batch, on ``number``
    pipelines, as of :func:`_shared`. Global batches are ``times``, or ``number`` times, as large."""
    tokens, seconds = 0, list[list[float]]()  # of each step, by pipeline
    for job, own in _larger(begun.asked, times or number).items():
        for step, batch in enumerate(own):
            works = in_data_order(batch, job, step, begun.asked.samples, padded=False)
            parts = (begun.even.in_order(works[each::number]) for each in range(number))
            seconds.append([blocking_seconds({0: each}, {job: job}) for each in parts])
            tokens += sum(batch)
    return tokens / max(map(sum, zip(*seconds, strict=True))), tokens / sum(map(max, seconds))


def _gathered(begun: Opening, number: int) -> tuple[float, float]:
    """Tokens a second of FSDP on the devices of ``number`` pipelines: with weights in time, and late."""
    time, devices, trace = begun.profile.time, number * begun.asked.stages, _larger(begun.asked, number)
    late = replace(begun.asked, stages=devices).gather
    in_time, waited = (
        sharded_rate(trace, time, devices=devices, size=begun.asked.samples, gather=each)
        for each in (0.0, late)
    )
    return in_time, waited


def _both(pipelines: Mapping[int, Pipeline], groups: Mapping[str, str]) -> tuple[float, float]:
    tokens = sum(work.tokens for each in pipelines.values() for work in each.works)
    return measure(pipelines)[0].tokens_per_second, tokens / blocking_seconds(pipelines, groups)


def _plait_copies(begun: Opening, number: int) -> tuple[float, float]:
    """Tokens a second of Plait's plan on ``number`` pipelines: as simulated, and with waits as of
    :func:`_shared`."""
    asked, profile = begun.asked, begun.profile
    layers = balanced(profile, asked)
    replicas = [Replica(each, pp=asked.stages, layer_split=layers) for each in range(number)]
    options = PlanOptions({each.id: asked.capacity for each in replicas}, drained=False)  # as theirs are
    plan = make_plan(global_batches(_larger(asked, number)), replicas, profile.time, options)
    groups = {job: group.jobs[0] for group in plan.groups for job in group.jobs}
    return _both(plan_pipelines(plan, profile.time, options), groups)


@benchmark("lorafusion/padding", Options)
def padding(settings: RunSettings, _jobs: Sequence[JobSpec], asked: Options) -> Report:
    """Share of padding among computed tokens: padded to the longest, by samples, and packed.

    Raises:
        ConfigError: no described cluster.
    """
    begun = opened(settings, asked)
    trace, even = begun.trace, begun.even
    figures = []
    for tile in (asked.tile, 1):
        share = measure({0: lorafusion(trace, even, replace(asked, tile=tile))})[0].padding_share
        name = "packed, nothing rounded up" if tile == 1 else f"packed, segments rounded up to {tile}"
        figures.append(Figure(name, 100 * share, "%", "computed"))
    apart = one_after_another(trace, even, size=asked.samples, padded=True, gpipe=False)
    share = measure({0: apart})[0].padding_share
    figures.append(Figure(f"{asked.samples} samples padded to the longest", 100 * share, "%", "computed"))
    return Report("LoRAFusion, padding", tuple(figures), asked.assumptions())

"""`plait profile`: memory and seconds of a model, measured on a small grid, fitted and stored.

On this machine it measures the run's model or, with --without-weights, computes its memory from the
configuration only. For a described cluster it compares the cluster's configurations by simulation. A seam:
loaded only if this verb runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table

from plait.cli.plan import check_cluster, described, draw_workload, model_name, say
from plait.core.errors import EXIT_DONE, CapacityError, ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import USUAL_CAPACITY, RunSettings
from plait.cost.probes import ProbeOptions
from plait.cost.profile_store import Profile, ProfileKey, load_profile, profile_mapping, save_profile
from plait.cost.profiles import ClusterProfile
from plait.data.loading import check_jobs
from plait.engine.build import ELEMENT_BYTES, free_memory, settle_dtype
from plait.planning.described import RECOMPUTED
from plait.planning.model_memory import model_memory
from plait.planning.profiling import Candidate, Made, compare, profile_device, profile_without_weights
from plait.search.checks import check_model
from plait.search.trials import SearchCommand
from plait.terminal.console import filled, plain, wide_console
from plait.utils.paths import cache_dir

if TYPE_CHECKING:
    from transformers import LlamaConfig


SHOWN = 24  # configurations in the table, best first
STEPS = 8  # global batches of each job that are simulated


JSON = "--json"
WITHOUT_WEIGHTS = "--without-weights"
MOST_CAPACITY = 4096  # looked at if engine.capacity leaves it open


def compare_configurations(command: SearchCommand, console: Console, *, as_json: bool) -> int:
    """Compare a described cluster's configurations for a search's jobs, print them and return the exit
    status.

    Raises:
        InputError: anything is wrong with the command, or nothing fits.
    """
    settings, cluster = described(command.settings)
    if len(cluster.kinds) > 1:
        raise ConfigError(
            f"cluster.kinds: {cluster}",
            "`plait profile` compares the configurations of one kind of device.",
            "Leave cluster.kinds out, or run `plait plan`, which chooses over all of them.",
        )
    profile = cluster.kinds[0]
    check_jobs(command.probes)
    shape = check_model(settings.model, command.probes)
    check_cluster(cluster, settings.model, shape)
    workload = draw_workload(command, settings, shape, cluster)
    names = [job.name for job in workload.jobs][: settings.search.parallel]
    available = int(settings.planner.memory_share * profile.devices.memory_bytes)

    def compared(checkpointing: bool) -> tuple[Candidate, ...]:
        return compare(
            profile.recomputing() if checkpointing else profile,
            {name: workload.batches[name][:STEPS] for name in names},
            model_memory(
                profile, replace(settings.engine, checkpointing=checkpointing), command.probes, say=say
            ),
            available=available,
            labelled_share=workload.labelled_share,
            say=say,
            most_tokens=command.settings.engine.capacity,
        )

    checkpointing = settings.engine.checkpointing
    try:
        found = compared(checkpointing)
    except CapacityError as error:
        if checkpointing:
            raise
        say(f"{error}\nWith engine.checkpointing=true:")
        checkpointing = True
        found = compared(checkpointing)
    if as_json:
        rows = [asdict(each) | {"chosen": place == 0} for place, each in enumerate(found)]
        facts = {"cluster": profile.name, "how": "simulated", "checkpointing": checkpointing}
        print(json.dumps(facts | {"configurations": rows}, indent=2))
        return EXIT_DONE
    console.print(_table(found, profile))
    plain(console, f"profile: {profile.model}, {profile.dtype}: {profile.source}")
    for line in (
        *((RECOMPUTED,) if checkpointing else ()),
        f"Throughput is simulated for the first {STEPS} steps of {len(names)} jobs of this search.",
        f"Memory is computed from {profile.model}'s sizes for Plait's own engine with this search's largest "
        "adapter and the heaviest samples; tensor parallelism is assumed to divide all of it evenly.",
    ):
        plain(console, f"- {line}")
    return EXIT_DONE


def _table(found: Sequence[Candidate], profile: ClusterProfile) -> Table:
    table = filled(
        f"Configurations of {profile.devices.count} × {profile.devices.kind}, {profile.model}",
        ("tp", "pp", "replicas", "capacity", "published", "memory per device", "tokens/s", ""),
        (
            (
                str(each.configuration.tp),
                str(each.configuration.pp),
                str(each.replicas),
                f"{each.configuration.max_tokens:,}",
                "ran" if each.published else "",
                "unknown" if each.predicted_bytes is None else f"{each.predicted_bytes / 2**30:.1f} GiB",
                "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}",
                each.reason or ("< best" if place == 0 else ""),
            )
            for place, each in enumerate(found[:SHOWN])
        ),
    )
    if len(found) > SHOWN:
        table.caption = f"The first {SHOWN} of {len(found)}; --json prints all of them."
    return table


def run_profile(command: SearchCommand, flags: Collection[str]) -> int:
    """Make the profile that a command asks for, print it and return the exit status.

    Raises:
        InputError: anything wrong with it, as in `plait sweep`.
    """
    as_json, weights = JSON in flags, WITHOUT_WEIGHTS not in flags
    console = wide_console()
    if command.settings.cluster.kind != "local":
        if not weights:
            raise ConfigError(
                f"{WITHOUT_WEIGHTS} with cluster={command.settings.cluster.options.get('name')}",
                "For a described cluster, profiles are always computed without weights.",
                f"Leave {WITHOUT_WEIGHTS} out.",
            )
        return compare_configurations(command, console, as_json=as_json)
    made = profile_here(command.settings, command.probes, weights=weights)
    before = load_profile(made.profile.key, cache=cache_dir())
    path = _keep(made.profile, before)
    if as_json:
        print(json.dumps(mapping(made) | {"path": None if path is None else str(path)}, indent=2))
        return EXIT_DONE
    show(made, console)
    kept = "not saved: a measured profile exists" if path is None else f"saved to {path}"
    plain(console, kept)
    if path is not None:
        plain(console, used_from_now_on(made.profile, before))
    return EXIT_DONE


def used_from_now_on(profile: Profile, before: Profile | None) -> str:
    """What storing the profile changes for searches."""
    earlier = USUAL_CAPACITY if before is None else before.capacity
    changed = "as before" if earlier == profile.capacity else f"{earlier:,} before"
    return (
        f"New searches on this model and device use microbatches of up to {profile.capacity:,} tokens "
        f"({changed}), unless they set engine.capacity. Delete the file to undo this."
    )


def _keep(profile: Profile, before: Profile | None) -> Path | None:
    """Store a profile, unless it is not measured and would replace a measured one."""
    if profile.how == "computed" and before is not None and before.how == "measured":
        return None
    return save_profile(profile, cache=cache_dir())


def profile_here(settings: RunSettings, jobs: Sequence[JobSpec], *, weights: bool) -> Made:
    """Profile the run's model on its device; without weights only its memory.

    Raises:
        InputError: the model is missing, an adapter does not fit it, or no capacity fits the device.
    """
    import torch

    from plait.engine.devices import choose_device, choose_kernels, device_kind
    from plait.models.load import load_model
    from plait.models.targets import resolve_targets

    settings = settle_dtype(settings)
    engine, shape = settings.engine, check_model(settings.model, jobs)
    device = choose_device(engine.device).type
    dtype: torch.dtype = getattr(torch, settings.model.dtype)
    names = {name for job in jobs for name in resolve_targets(job.adapter.target_modules, shape.linears)}
    options = ProbeOptions(
        dtype=dtype,
        checkpointing=engine.checkpointing,
        targets=tuple(sorted({name.rpartition(".")[2] for name in names})),
        backend=choose_kernels(engine.kernels, torch.device(device), dtype),
    )
    key = ProfileKey.of(
        shape.digest, settings.model.dtype, device_kind(device), engine, on_cpu=device == "cpu"
    )
    available = int(settings.planner.memory_share * free_memory(settings))
    most = engine.capacity or MOST_CAPACITY
    if not weights:
        from plait.models.load import model_config

        config = cast("LlamaConfig", model_config(settings.model, cache=cache_dir()))
        return profile_without_weights(
            config,
            model_name(settings.model),
            key,
            options,
            most=most,
            available=available,
            say=say,
        )
    _check_weights_fit(shape.parameters * ELEMENT_BYTES[settings.model.dtype], available)
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    model = load_model(settings.model, cache=cache_dir(), device=device)
    return profile_device(model, key, options, most=most, available=available, say=say)


def mapping(made: Made) -> dict[str, Any]:
    """The profile and the fits behind it, as a mapping for JSON."""
    raw = profile_mapping(made.profile)
    raw["memory"].pop("observations")  # they stay in the stored file
    fits = {f"memory {name}": phase.fit for name, phase in made.profile.memory.phases.items()}
    fits |= {"layers": made.layer_fit, "head": made.head_fit}
    return raw | {
        "available_bytes": made.available,
        "fits": {
            name: {"errors": list(fit.errors), "margin": fit.margin}
            for name, fit in fits.items()
            if fit is not None
        },
        "held_out": {"memory": list(made.memory_errors), "time": list(made.time_errors)},
    }


def show(made: Made, console: Console) -> None:
    """Print a profile: coefficients, errors, the choice of capacity."""
    profile = made.profile
    key = profile.key
    plain(
        console,
        f"{profile.model}, {key.dtype}, on {key.device}: kernels {key.kernels}, checkpointing "
        f"{str(key.checkpointing).lower()}, threads {key.threads}; adapters on {', '.join(profile.targets)}",
    )
    console.print(_memory(profile))
    if profile.time is not None:
        console.print(_time(made))
    console.print(_errors(made), _capacities(made))


def _memory(profile: Profile) -> Table:
    coefficients = {name: asdict(phase.coefficients) for name, phase in profile.memory.phases.items()}
    shown = list(next(iter(coefficients.values())))
    return filled(
        "Memory above weights and adapters, in bytes (the highest phase counts)",
        ("phase", *("fixed" if name == "fixed" else f"each {name}" for name in shown)),
        ((phase, *(f"{values[name]:,.1f}" for name in shown)) for phase, values in coefficients.items()),
        left=("phase",),
    )


def _time(made: Made) -> Table:
    time = made.profile.time
    assert time is not None
    layer, head = time.layer[1], time.head[1]
    of_layer = f"{layer.fixed:.3e}", f"{layer.token:.3e}", f"{layer.square:.3e}", ""
    return filled(
        "Seconds of a microbatch, forward and backward",
        ("part", "fixed", "each token", "each token²", "each labelled token", "forward's share"),
        (
            ("one layer", *of_layer, f"{time.forward_share:.3f}"),
            (
                *("head and loss", f"{head.fixed:.3e}", "", "", f"{head.labelled:.3e}"),
                f"{time.head_forward_share:.3f}",
            ),
        ),
        left=("part",),
    )


def _errors(made: Made) -> Table:
    """Mean and largest error of each fit, on fitted and on held-out observations."""
    seen = {f"memory, {name}": phase.fit for name, phase in made.profile.memory.phases.items()}
    seen |= {"seconds, layers": made.layer_fit, "seconds, head and loss": made.head_fit}
    found = {name: fit.errors for name, fit in seen.items() if fit is not None}
    found |= {"memory, held out": made.memory_errors, "seconds, held out": made.time_errors}
    if made.profile.depth_error is not None:
        found["memory, extrapolated from 2 and 3 layers"] = (made.profile.depth_error,)
    sizes = {name: [abs(error) for error in errors] for name, errors in found.items() if errors}
    return filled(
        "Relative errors",
        ("fit", "points", "mean", "largest"),
        (
            (name, str(len(own)), f"{100 * sum(own) / len(own):.3f} %", f"{100 * max(own):.3f} %")
            for name, own in sizes.items()
        ),
        left=("fit",),
    )


def _capacities(made: Made) -> Table:
    return filled(
        f"Capacity ({made.profile.how}); {made.available / 2**30:.2f} GiB may be used",
        ("capacity", "tokens/s", "peak bytes", "fits", "chosen"),
        (
            (
                f"{choice.capacity:,}",
                "unknown" if choice.tokens_per_second is None else f"{choice.tokens_per_second:,.0f}",
                f"{choice.predicted_bytes / 2**30:.2f} GiB",
                "yes" if choice.fits else "no",
                "<" if choice.capacity == made.profile.capacity else "",
            )
            for choice in made.profile.capacities
        ),
    )


def _check_weights_fit(weights: int, available: int) -> None:
    if weights > available:
        raise CapacityError(
            f"weights of {weights / 2**30:.2f} GiB",
            f"{available / 2**30:.2f} GiB may be used (planner.memory_share of the device's memory).",
            f"Use a smaller model, or {WITHOUT_WEIGHTS} to compute its memory alone.",
        )

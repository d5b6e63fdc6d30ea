"""`plait profile`: memory and seconds of a model, measured on a small grid, fitted and stored.

On this machine it measures the run's model or, with --without-weights, computes its memory from the
configuration only. A seam: loaded only if this verb runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table

from plait.cli.plan import model_name
from plait.core.errors import EXIT_DONE, CapacityError, ConfigError
from plait.core.jobs import JobSpec
from plait.core.settings import USUAL_CAPACITY, RunSettings
from plait.cost.probes import ProbeOptions
from plait.cost.profile_store import Profile, ProfileKey, load_profile, profile_mapping, save_profile
from plait.engine.build import ELEMENT_BYTES, free_memory, largest_made, settle_dtype
from plait.planning.profiling import Made, profile_device, profile_without_weights
from plait.search.checks import check_model
from plait.search.trials import SearchCommand
from plait.terminal.console import filled, plain, wide_console
from plait.utils.paths import cache_dir
from plait.utils.progress import say

if TYPE_CHECKING:
    from transformers import LlamaConfig


JSON = "--json"
WITHOUT_WEIGHTS = "--without-weights"
_DROPOUT = 0.1  # any; a profile is also used for jobs that drop, for which Triton's kernels keep more
MOST_CAPACITY = 4096  # looked at if engine.capacity leaves it open


def run_profile(command: SearchCommand, flags: Collection[str]) -> int:
    """Make the profile that a command asks for, print it and return the exit status.

    Raises:
        InputError: anything wrong with it, as in `plait sweep`.
    """
    as_json, weights = JSON in flags, WITHOUT_WEIGHTS not in flags
    console = wide_console()
    if command.settings.cluster.kind != "local":
        raise ConfigError(
            f"plait profile cluster={command.settings.cluster.options.get('name')}",
            "It measures this machine; a described cluster has its profile in its file.",
            "Run `plait plan` with the same arguments: it chooses the cluster's configurations.",
        )
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
    backend = choose_kernels(engine.kernels, torch.device(device), dtype)
    options = ProbeOptions(
        dtype=dtype,
        checkpointing=engine.checkpointing,
        targets=tuple(sorted({name.rpartition(".")[2] for name in names})),
        backend=backend,
        dropout=_DROPOUT if backend == "triton" else 0.0,
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
            made=largest_made(shape.together, ELEMENT_BYTES[settings.model.dtype], settings.model.quantise),
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
    """Print a profile: its errors and the choice of capacity; --json has the coefficients."""
    profile = made.profile
    key = profile.key
    plain(
        console,
        f"{profile.model}, {key.dtype}, on {key.device}: kernels {key.kernels}, checkpointing "
        f"{str(key.checkpointing).lower()}, threads {key.threads}; adapters on {', '.join(profile.targets)}",
    )
    console.print(_errors(made), _capacities(made))


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
            f"Use a smaller model, or {WITHOUT_WEIGHTS} to compute only its memory.",
        )

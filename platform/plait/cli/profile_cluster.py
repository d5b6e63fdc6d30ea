"""`plait profile cluster=...`: the configurations of a described cluster, compared by simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from plait.cli.plan import check_cluster, described, draw_workload
from plait.core.errors import EXIT_DONE, CapacityError
from plait.cost.profiles import ClusterProfile
from plait.planning.described import RECOMPUTED
from plait.planning.model_memory import model_memory
from plait.planning.parallelism import Candidate, compare
from plait.search.checks import check_jobs, check_model
from plait.search.command import SearchCommand

SHOWN = 24  # configurations in the table, best first
STEPS = 8  # global batches of each job that are simulated


def compare_configurations(
    command: SearchCommand, console: Console, *, as_json: bool, say: Callable[[str], None]
) -> int:
    """Compare a described cluster's configurations for a search's jobs and print them; the exit status.

    Raises:
        InputError: anything that is wrong with the command, or nothing fits.
    """
    settings, profile = described(command.settings)
    check_jobs(command.probes)
    shape = check_model(settings.model, command.probes)
    check_cluster(profile, settings.model, shape)
    workload = draw_workload(command, settings, shape, profile)
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
    console.print(
        f"profile: {profile.model}, {profile.dtype}: {profile.source}", markup=False, highlight=False
    )
    if checkpointing:
        console.print(
            f"- {RECOMPUTED}",
            markup=False,
            highlight=False,
        )
    for line in (
        f"Throughput is simulated over the first {STEPS} steps of {len(names)} jobs of this search.",
        f"Bytes are computed from {profile.model}'s sizes for Plait's own engine with this search's largest "
        "adapter, every sample as heavy as can be; tensor parallelism is taken to divide all of it.",
    ):
        console.print(f"- {line}", markup=False, highlight=False)
    return EXIT_DONE


def _table(found: Sequence[Candidate], profile: ClusterProfile) -> Table:
    table = Table(
        title=f"Configurations of {profile.devices.count} × {profile.devices.kind}, {profile.model}"
    )
    for heading in ("tp", "pp", "replicas", "capacity", "published", "bytes on a device", "tokens/s", ""):
        table.add_column(heading, justify="right")
    if len(found) > SHOWN:
        table.caption = f"The first {SHOWN} of {len(found)}; --json gives all of them."
    for place, each in enumerate(found[:SHOWN]):
        rate, size = each.tokens_per_second, each.predicted_bytes
        table.add_row(
            str(each.configuration.tp),
            str(each.configuration.pp),
            str(each.replicas),
            f"{each.configuration.max_tokens:,}",
            "ran" if each.published else "",
            "unknown" if size is None else f"{size / 2**30:.1f} GiB",
            "" if rate is None else f"{rate:,.0f}",
            each.reason or ("< best" if place == 0 else ""),
        )
    return table

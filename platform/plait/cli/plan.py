"""`plait plan`: takes the arguments of `plait sweep`, shows what would run where, and trains nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.cli.shown_plan import show
from plait.core.errors import EXIT_DONE, ConfigError, choices
from plait.core.settings import ModelSettings, RunSettings
from plait.cost.clusters import Cluster, described_cluster
from plait.engine.build import (
    LoadedData,
    check_engine,
    open_data,
    replica_bytes,
    settle_dtype,
    threads_each,
    worker_facts,
)
from plait.planning.described import plan_described
from plait.planning.expected import rates_of
from plait.planning.here import Here, plan_here
from plait.planning.model_memory import model_memory
from plait.planning.outlook import CandidateOutlook, Outlook
from plait.planning.workload import Workload
from plait.search.checks import (
    check_budgets,
    check_cut,
    check_model,
    check_search,
    find_study,
    settle_here,
)
from plait.search.identity import identify
from plait.search.points import too_few_points
from plait.search.recorded import recorded_command
from plait.search.study import suggest_jobs
from plait.search.trials import SearchCommand
from plait.simulate.forecast import Forecast
from plait.simulate.timeline import chrome_trace
from plait.terminal.console import wide_console
from plait.utils.files import disk_errors
from plait.utils.paths import search_folder, user_path
from plait.utils.progress import say

if TYPE_CHECKING:
    from plait.models.load import ModelShape

JSON = "--json"
TIMELINE = "--timeline"
DEVICES = "--devices"
MOST_DEVICES = 1_024  # of a kind, that a plan is asked for: it simulates every replica
MOST_TRIALS = 10_000  # that are planned: each takes some 40 ms
MANY_TRIALS = 200  # of which a line says that they take a while
ENTRY_SHOWN = 60  # characters of a wrong entry
STAND_INS = ("smollm2", "tiny")  # models of Plait; on a described cluster, tokenisers only


def run_plan(command: SearchCommand, flags: Mapping[str, str]) -> int:
    """Plan the search of a command, print the plan and return the exit status.

    Raises:
        InputError: anything wrong with it, as in `plait sweep`.
    """
    timeline = None if TIMELINE not in flags else _timeline(flags[TIMELINE], command.settings)
    waves: list[Forecast] = []
    outlook = plan_search(command, devices=flags.get(DEVICES), on_wave=waves.append)
    if few := too_few_points(command.settings.search, command.space):
        say(few)
    if timeline is not None:
        with disk_errors(timeline, "The timeline cannot be written there."):
            timeline.write_text(chrome_trace(waves[0].run, waves[0].pipelines), encoding="utf-8")
    if JSON in flags:
        print(json.dumps(outlook.mapping(), indent=2))
        return EXIT_DONE
    show(outlook, wide_console())
    return EXIT_DONE


def _timeline(text: str, settings: RunSettings) -> Path:
    """The file that is to hold the first wave's simulated run.

    Raises:
        ConfigError: its name is that of no trace, or nothing will be simulated.
    """
    if (path := user_path(text)).suffix != ".json":
        raise ConfigError(
            f"{TIMELINE} {text}",
            "The file is a trace for Perfetto, and its name must end in .json.",
            f"For example {TIMELINE} run.json.",
        )
    if settings.cluster.kind == "local":
        raise ConfigError(
            f"{TIMELINE} {text}",
            "Only the plan for a described cluster is simulated.",
            "Choose one with cluster=NAME.",
        )
    return path


def plan_search(
    command: SearchCommand,
    *,
    devices: str | None,
    on_wave: Callable[[Forecast], None],
) -> Outlook:
    """Suggest the search's trials and plan them, on this machine or on the described cluster.

    Args:
        devices: numbers of devices to plan for, as in ``--devices``.
        on_wave: called with the forecast of each simulated wave.

    Raises:
        InputError: as for :func:`run_plan`.
    """
    _check_trials(command)
    check_search(command)
    if command.settings.cluster.kind == "local" and devices is not None:
        raise ConfigError(
            f"{DEVICES} {devices}",
            "The number of devices can only be set for a described cluster.",
            "Choose one with cluster=NAME (`plait plan --help` lists them). cluster.processes=N is for this "
            "machine.",
        )
    if command.settings.cluster.kind == "local":
        return _plan_local(command)
    settings, cluster = described(command.settings)
    numbers = () if devices is None else read_numbers(devices, cluster)
    rates_of(settings.planner.objective, cluster)  # raises if a price is missing
    asked = command.settings.engine.capacity
    if asked is not None and asked > settings.engine.capacity_or_usual:
        tables = ", ".join(dict.fromkeys(repr(each.table) for each in cluster.kinds))
        raise ConfigError(
            f"engine.capacity={asked}",
            f"A replica of {cluster.name} takes at most {settings.engine.capacity} tokens (table {tables}).",
            "Set engine.capacity to no more than that, or leave it out.",
        )
    shape = check_model(settings.model, command.probes)
    check_cluster(cluster, settings.model, shape)
    workload = draw_workload(command, settings, shape, cluster)
    return plan_described(
        workload,
        settings,
        cluster,
        model_memory(
            cluster.kinds[0], settings.engine, workload.jobs, quantise=settings.model.quantise, say=say
        ),
        tokeniser=model_name(settings.model),
        numbers=numbers,
        on_wave=on_wave,
    )


def _check_trials(command: SearchCommand) -> None:
    """Refuse a search of which every trial cannot be composed in minutes; say so if it takes longer than a
    few seconds."""
    trials = command.settings.search.trials
    number = min(trials, trials if command.space.size is None else command.space.size)
    if number > MOST_TRIALS:
        raise ConfigError(
            f"search.trials={trials}",
            f"Each trial is planned by itself, and at most {MOST_TRIALS:,} can be planned.",
            "Plan fewer trials; for more of the same space, time and cost grow in proportion.",
        )
    if number >= MANY_TRIALS:
        say(f"Composing {number:,} trials ...")


def read_numbers(text: str, cluster: Cluster) -> tuple[dict[str, int], ...]:
    """Numbers of devices from ``--devices``: 1,2,4 or, for several kinds, H100:4,H100:2+A100:8.

    Raises:
        ConfigError: an entry is not a number from 1 to MOST_DEVICES, or not a kind of the cluster.
    """
    kinds = list(cluster.devices)
    found = []
    for entry in text.split(","):
        pairs = (
            [("", entry)] if kinds == [""] else [tuple(each.partition(":")[::2]) for each in entry.split("+")]
        )
        numbers = {kind: _number(number) for kind, number in pairs if kind in kinds}
        if len(numbers) < len(pairs) or not all(numbers.values()):
            example = "1,2,4,8" if kinds == [""] else f"{kinds[0]}:1,{':1+'.join(kinds)}:1"
            raise ConfigError(
                f"{DEVICES}: {entry[:ENTRY_SHOWN]!r}",
                f"Each entry is a number of devices, from 1 to {MOST_DEVICES:,}"
                + ("." if kinds == [""] else f", of each kind that is used: {choices(kinds)}."),
                f"For example {DEVICES} {example}.",
            )
        found.append(numbers)
    return tuple(found)


def _number(text: str) -> int:
    """A number of devices; 0 if the text is not a number, or it is more than MOST_DEVICES."""
    digits = text.strip()
    short = digits.isdecimal() and len(digits) <= len(str(MOST_DEVICES))  # int() refuses thousands of digits
    return int(digits) if short and int(digits) <= MOST_DEVICES else 0


def _plan_local(command: SearchCommand) -> Outlook:
    from plait.engine.admission import Admission
    from plait.engine.deployments import measure, time_of
    from plait.engine.devices import choose_device
    from plait.engine.replicas import dispatch_time, replicas_of

    folder, settings = _search_folder(command), settle_dtype(command.settings)
    check_engine(settings, command.probes)
    shape = check_model(settings.model, command.probes)
    check_cut(settings, shape, command.probes)
    jobs = suggest_jobs(replace(command, settings=settings))
    data = _checked(command, open_data(settings, shape.max_length, jobs)).catalogue
    settled = settle_here(settings, shape, data, command.probes, points=command.space.size, folder=folder)
    settings, stored, choice = settled.settings, settled.profile, settled.choice
    for line in settled.said:
        say(line)
    facts = worker_facts(settings, shape, settled.memory_bytes)
    workload = Workload.of(jobs, data)
    device, processes = choose_device(settings.engine.device), settings.cluster.processes
    memory = replica_bytes(settings)
    if not settings.cluster.staged:
        held, speeds = tuple(facts.whole(each) for each in memory), settings.cluster.speeds[:processes]
        facts = replace(facts, memory_bytes=min(memory), held=held, speeds=speeds)
    facts = replace(facts, devices=(str(device),) * len(settings.cluster.stages))
    admission = Admission(facts, settings, stored)
    replicas = replicas_of(facts, settings, stored)
    admission.take_replicas(facts, replicas)
    number = processes if device.type == "cuda" else 1  # on a processor they share it
    threads = threads_each(settings) if processes > 1 else None
    time, unknown = time_of(settings, shape, stored, min(memory))
    each = f"{min(memory) / 2**30:.1f} GiB" + (f", engine.threads={threads}" if threads else "")
    here = Here(
        devices=f"{number} × {device}, {each}{' for each process' if processes > 1 else ''}",
        number=number,
        measure=measure(settings),
        replicas=replicas,
        dispatch=dispatch_time(facts, stored),
        time=time,
        unknown=unknown,
    )
    outlook = plan_here(workload, settings, admission, stored, here)
    if choice is None:
        return outlook
    rows = (
        CandidateOutlook(str(each.replicas), each.jobs, each.bytes, each.seconds, each.why)
        for each in choice.candidates
    )
    return replace(outlook, candidates=tuple(rows))


def _search_folder(command: SearchCommand) -> Path:
    """The folder of the search that is planned; if it has begun, it resumes with the choices in it.

    Raises:
        SearchError: another search has begun under its name.
        StorageError: its study does not answer.
    """
    search, root = command.settings.search, command.settings.tracking.root
    identity = identify(command.space, command.base, command.settings)
    name = search.name or identity.name
    if not search.fresh and recorded_command(root, name) is not None:
        find_study(command, name, identity)
        say(f"{name} has begun: it is planned with the choices that it began with, and all its trials.")
    return search_folder(root, name)


def draw_workload(
    command: SearchCommand, settings: RunSettings, shape: ModelShape, cluster: Cluster
) -> Workload:
    """The search's first trials with the global batches of their data, on a described cluster.

    Args:
        settings: as returned by :func:`described`.
        shape: shape of the run's model. If only its tokeniser is used, its longest sample is no limit.

    Raises:
        DataError, StorageError: the data cannot be used.
    """
    jobs = suggest_jobs(replace(command, settings=settings))
    longest = shape.max_length
    if settings.model.kind in STAND_INS:
        longest = settings.model.max_length or sys.maxsize
    data = open_data(settings, longest, jobs, cluster=str(cluster))
    return Workload.of(jobs, _checked(command, data).catalogue)


def _checked(command: SearchCommand, data: LoadedData) -> LoadedData:
    """The data, after what of it is left out was said; errors as for ``check_budgets``."""
    for line in data.said:
        say(line)
    check_budgets(command.settings, data.catalogue, command.probes)
    return data


def described(settings: RunSettings) -> tuple[RunSettings, Cluster]:
    """The cluster, and settings that allow samples as long as fit on the cluster.

    ``engine.capacity``, if given, limits what the cluster's tables allow.

    Raises:
        ConfigError: the kind of cluster is unknown, or an entry of its description is missing or wrong.
    """
    if settings.cluster.kind != "described":
        raise ConfigError(
            f"cluster.kind={settings.cluster.kind!r}",
            "cluster.kind must be local or described.",
            "Choose a described cluster with cluster=NAME, or leave cluster.kind out.",
        )
    settings = settle_dtype(settings)  # of the local model, of which perhaps only the tokeniser is used
    cluster = described_cluster(settings.cluster)
    most = max(each.max_tokens for kind in cluster.kinds for each in kind.allowed or kind.configurations)
    asked = settings.engine.capacity
    if asked is not None:
        cluster, most = cluster.at_most(asked), min(asked, most)
    return replace(settings, engine=replace(settings.engine, capacity=most)), cluster


def check_cluster(cluster: Cluster, settings: ModelSettings, shape: ModelShape) -> None:
    """Check that the cluster's profiles are of the run's model, unless that comes with Plait, when only its
    tokeniser is used.

    Raises:
        ConfigError: the profiles are of another model.
    """
    if settings.kind not in STAND_INS:
        model = model_name(settings)
        cluster.kinds[0].check_model(model, layers=shape.layer_count, hidden_size=shape.hidden_size)


def model_name(settings: ModelSettings) -> str:
    """The user's name for the model."""
    return str(settings.id or settings.path or settings.kind)
